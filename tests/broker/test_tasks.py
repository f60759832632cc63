"""Ending tasks for certain. No engine."""

from __future__ import annotations

import asyncio
import contextlib

from broker import tasks


async def stubborn(cancellations: int) -> None:
    """Swallows so many cancellations, as a client library does when a reply arrives at the same moment."""
    for _ in range(cancellations):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
    await asyncio.Event().wait()


async def test_end_ends_a_task_that_swallows_a_cancellation() -> None:
    task = asyncio.create_task(stubborn(2))
    await asyncio.sleep(0)

    await tasks.end(task)

    assert task.cancelled()


async def test_end_takes_a_failed_task_as_ended_without_raising() -> None:
    async def fail() -> None:
        raise RuntimeError("failed before")

    task = asyncio.create_task(fail())
    await asyncio.wait([task])

    await tasks.end(task)

    assert task.done()
