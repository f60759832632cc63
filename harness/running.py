"""Brings requests into the state a test starts from, by the scripts alone."""

from __future__ import annotations

from broker.scripts import DEFAULT_BOUNDS, Scripts
from broker.wire import Assignment, Priority
from harness import factories as make


async def accept(scripts: Scripts, *request_ids: str, priority: Priority = "interactive") -> None:
    """Requests that wait."""
    for request_id in request_ids:
        submission = make.submission(request_id, ticket=make.ticket(request_id, priority=priority))
        await scripts.accept(submission, DEFAULT_BOUNDS)


async def run_rows(scripts: Scripts, *request_ids: str, worker_id: str = "w1") -> list[Assignment]:
    """Requests that run on a worker, which is registered if it is new."""
    await scripts.register(make.registration(worker_id))
    await accept(scripts, *request_ids)
    await scripts.form(worker_id, "c1", request_ids)
    return [Assignment(request_id, 1) for request_id in request_ids]
