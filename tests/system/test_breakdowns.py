"""What clients see when workers, Redis or its memory fail under them. Real processes; engine: scripted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from broker.client.client import Client
from console.supervisor import EXIT_CONFIG
from harness.announcements import expected
from harness.stack import Stack, answers, connection, wait_until
from tests.system.breaking import (
    Streams,
    complete,
    complete_when_ready,
    state_of,
    until_async,
)

DEADLY = "deadly!"
LEASE_S = "20"
"""Nobody here is to be found dead for its silence, however busy the machine: whoever ends, says so."""


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Three workers; a certain prompt kills the engine of whoever decodes it."""
    stack = Stack(workers=3)
    script = ("--engine", "scripted", "--script-step-s", "0.01", "--script-dead-text", DEADLY)
    stack.arguments["worker"] = (*script, "--max-context-tokens", "4096", "--lease-s", LEASE_S, "--grace-s", "5")
    stack.arguments["former"] = ("--lease-s", LEASE_S)
    stack.arguments["api"] = ("--registry-age-s", "0.1")
    with stack:
        yield stack


async def test_step_that_raises_ends_in_an_error_and_workers_that_exit_for_their_supervisor(
    stack: Stack, streams: Streams, http: httpx.AsyncClient
) -> None:
    [told] = streams.start(f"very {DEADLY}", length=20)

    await streams.end()
    codes = [stack.processes[f"worker-{i}"].wait(30) for i in range(3)]

    async def is_unready() -> bool:
        return (await http.get("/health")).status_code == 503

    await until_async(is_unready, "health goes unready")
    stack.restart_dead()
    wait_until(lambda: stack.accepting_workers() == 3, "three workers accept")

    assert told.is_broken_off, str(told)
    assert codes == [1, 1, 1]
    assert await complete_when_ready(http, "after", 5) == expected("after", 5)


async def test_redis_killed_and_started_again_loses_nothing_that_waits_or_streams(
    stack: Stack, streams: Streams, http: httpx.AsyncClient, client: Client
) -> None:
    told = streams.start(*(f"kept {i}" for i in range(40)), length=150)
    await streams.grow(20, told[:8])

    async def are_accepted() -> bool:
        return (await client.registry.load()).requests["interactive"] == sum(not each.is_right for each in told)

    await until_async(are_accepted, "all are accepted")
    stack.kill("redis")
    refused = await complete(http, "meanwhile", 5)
    stack.start_one("redis")
    await streams.end()

    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert [str(each) for each in told if not each.is_right] == []
    assert {await state_of(client, each, "attempt") for each in told} == {"1"}


async def test_log_that_lost_its_last_moments_shows_no_wrong_or_repeated_token(
    stack: Stack, streams: Streams, http: httpx.AsyncClient
) -> None:
    early = streams.start(*(f"early {i}" for i in range(12)), length=200)
    await streams.grow(40, early)
    [log] = (stack.folder / "appendonlydir").glob("*.incr.aof")
    kept = log.stat().st_size
    late = streams.start(*(f"late {i}" for i in range(6)), length=60)
    await streams.grow(10, late)
    await streams.grow(80, early)

    stack.kill("redis")
    _cut(log, kept)
    stack.start_one("redis")
    await streams.end()

    assert [str(each) for each in early if not each.is_right] == []
    assert [str(each) for each in late if not (each.is_right or each.is_broken_off)] == []
    assert any(each.is_broken_off for each in late), "nothing was undone"
    assert await complete_when_ready(http, "after", 5) == expected("after", 5)


async def test_redis_emptied_under_it_ends_streams_with_errors_and_daemons_recover(
    stack: Stack, streams: Streams, http: httpx.AsyncClient
) -> None:
    told = streams.start(*(f"flushed {i}" for i in range(12)), length=2000)
    await streams.grow(10)
    pids = {name: process.pid for name, process in stack.processes.items()}

    with connection(stack.redis_url) as redis:
        redis.flushall()
    await streams.end()
    answer = await complete_when_ready(http, "after", 5)

    assert [str(each) for each in told if not each.is_broken_off] == []
    assert answer == expected("after", 5)
    wait_until(lambda: stack.accepting_workers() == 3, "three workers accept")
    assert {name: process.pid for name, process in stack.processes.items()} == pids
    assert all(process.poll() is None for process in stack.processes.values())


async def test_redis_out_of_memory_is_a_503_and_no_crash(
    stack: Stack, streams: Streams, http: httpx.AsyncClient
) -> None:
    told = streams.start("before", length=100)
    await streams.grow(5)

    stack.configure_redis(maxmemory=1)
    refused = await complete(http, "meanwhile", 5)
    stack.configure_redis(maxmemory=0)
    await streams.end()

    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert [str(each) for each in told if not each.is_right] == []
    assert all(process.poll() is None for process in stack.processes.values())
    assert await complete_when_ready(http, "after", 5) == expected("after", 5)


@pytest.mark.parametrize("kind", ["api", "former", "worker"])
def test_daemon_refuses_to_start_on_a_redis_that_may_evict(stack: Stack, kind: str) -> None:
    wait_until(lambda: answers(stack.redis_url), "redis answers")
    stack.configure_redis(**{"maxmemory-policy": "allkeys-lru"})
    name = f"{kind}-late"
    if kind == "api":
        stack.ports[name] = 0
    try:
        stack.start_one(name)
        code = stack.processes.pop(name).wait(60)
    finally:
        stack.ports.pop(name, None)
        stack.configure_redis(**{"maxmemory-policy": "noeviction"})

    assert code == EXIT_CONFIG
    assert "maxmemory-policy = allkeys-lru" in (stack.folder / f"{name}.log").read_text()


def _cut(log: Path, size: int) -> None:
    assert log.stat().st_size > size
    with log.open("r+b") as file:
        file.truncate(size)
