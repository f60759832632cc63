"""Redis is away for half a minute, frozen or killed, with a lease of one second. Real processes; engine: scripted.

Both outages happen at the same time, each on a stack of its own; the tests then look at what came of it.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import pytest
import pytest_asyncio

from broker import keys
from harness.announcements import Told
from harness.stack import Stack, connection
from tests.system.breaking import complete, http_of, streams_of, until

How = Literal["frozen", "killed"]
AWAY_S = 30.0
FILE = {"file": ("in.jsonl", b"{}", "application/jsonl")}
BATCH = {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h"}
OFFLINE_CALLS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("GET", "/v1/batches", {}),
    ("GET", "/v1/files", {}),
    ("POST", "/v1/batches", {"json": BATCH}),
    ("POST", "/v1/files", {"data": {"purpose": "batch"}, "files": FILE}),
    ("GET", "/v1/files/f/content", {}),
    ("DELETE", "/v1/files/f", {}),
    ("POST", "/v1/batches/b/cancel", {}),
)
RUN_AHEAD = 100
LENGTH = 400


@dataclass(slots=True)
class Outage:
    """What was seen of one outage."""

    told: list[Told] = field(default_factory=list)
    seen_before: list[int] = field(default_factory=list)
    seen_ahead: list[int] = field(default_factory=list)
    """Characters that were decoded while Redis was away: what arrived once it was back, the engine being held."""
    refusals: list[httpx.Response] = field(default_factory=list)
    """Answers to requests during the outage."""
    health: list[int] = field(default_factory=list)
    attempts: set[str] = field(default_factory=set)
    ended: dict[str, int] = field(default_factory=dict)
    deaths: list[str] = field(default_factory=list)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def outages() -> Mapping[How, Outage]:
    frozen, killed = await asyncio.gather(_observe("frozen"), _observe("killed"))
    return {"frozen": frozen, "killed": killed}


@pytest.fixture(params=["frozen", "killed"])
def outage(request: pytest.FixtureRequest, outages: Mapping[How, Outage]) -> Outage:
    return outages[request.param]


async def _observe(how: How) -> Outage:
    stack = Stack()
    lease = ("--lease-s", "1")
    script = ("--engine", "scripted", "--script-step-s", "0.03", "--run-ahead-steps", str(RUN_AHEAD))
    stack.arguments["worker"] = (*script, *lease)
    stack.arguments["former"] = lease
    await asyncio.to_thread(stack.__enter__)
    try:
        return await _go_through(stack, how)
    finally:
        await asyncio.to_thread(stack.__exit__, None, None, None)


async def _go_through(stack: Stack, how: How) -> Outage:
    outage = Outage()
    async with streams_of(stack) as streams:
        running = streams.start(*(f"{how} runs {i}" for i in range(8)), length=LENGTH)
        await streams.grow(10)
        streams.start(*(f"{how} waits {i}" for i in range(4)), length=LENGTH // 8)
        outage.told = streams.told
        await until(lambda: all(told.request_id for told in outage.told))
        if how == "frozen":
            stack.signal("redis", signal.SIGSTOP)
        else:
            await asyncio.to_thread(stack.kill, "redis")
        await _ask_in_vain(stack, outage)
        # Not at its start: what Redis had sent by then may still be on its way to a client.
        outage.seen_before = [len(told.seen) for told in running]
        with stack.engines_held():
            if how == "frozen":
                stack.signal("redis", signal.SIGCONT)
            else:
                stack.start_one("redis")
            await until(lambda: min(_more(running, outage.seen_before)) >= RUN_AHEAD // 2, running)
            outage.seen_ahead = _more(running, outage.seen_before)
        await streams.end()
    with connection(stack.redis_url) as redis:
        states = [redis.hgetall(keys.state(told.request_id)) for told in outage.told]
        outage.attempts = {state[b"attempt"].decode() for state in states}
        outage.ended = {name.decode(): int(count) for name, count in redis.hgetall(keys.ENDED).items()}
    outage.deaths = [line for line in stack.logs().splitlines() if "is dead" in line or "declared dead" in line]
    return outage


async def _ask_in_vain(stack: Stack, outage: Outage) -> None:
    """New requests over the length of the outage, the first of them at its very start."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + AWAY_S
    async with http_of(stack) as http:
        for method, path, sent in itertools.cycle(OFFLINE_CALLS):
            if loop.time() >= end_s:
                break
            outage.refusals += [await complete(http, "meanwhile", 5), await http.request(method, path, **sent)]
            outage.health.append((await http.get("/health")).status_code)
            await asyncio.sleep(0.5)


def _more(running: Sequence[Told], before: Sequence[int]) -> list[int]:
    """Characters that each has been told since."""
    return [len(told.seen) - seen for told, seen in zip(running, before, strict=True)]


def test_new_requests_are_refused_while_redis_is_away(outage: Outage) -> None:
    """Each call is, and once more: none waits for Redis to be back, or for the time-outs of a connection.

    That it takes a second and no more is tested by a clock of the test's own, in `broker/test_outage.py`.
    """
    assert {refusal.status_code for refusal in outage.refusals} == {503}
    assert all(refusal.headers["retry-after"] for refusal in outage.refusals)
    assert len(outage.health) >= 2 * len(OFFLINE_CALLS)


def test_health_answers_and_goes_unready(outage: Outage) -> None:
    assert set(outage.health[2:]) == {503}


def test_nothing_accepted_is_lost_and_no_token_is_wrong(outage: Outage) -> None:
    assert [str(told) for told in outage.told if not told.is_right] == []


def test_no_attempt_is_raised_and_nothing_is_cancelled(outage: Outage) -> None:
    assert outage.attempts == {"1"}
    assert outage.ended.pop("interactive:finished:length") == len(outage.told)
    # Sent to a server that froze, and answered with 503: it may have been accepted once the server went on.
    assert outage.ended in ({}, {"interactive:cancelled:listener": 1})


def test_nobody_is_declared_dead(outage: Outage) -> None:
    assert outage.deaths == []


def test_running_rows_decode_on_within_a_bound(outage: Outage) -> None:
    # Steps under way when Redis went, and those since it came back, blur it; without a bound it would be all of a row.
    within = range(RUN_AHEAD // 2, 2 * RUN_AHEAD + 1)
    assert [ahead for ahead in outage.seen_ahead if ahead not in within] == []
