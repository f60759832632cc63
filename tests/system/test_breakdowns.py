"""What clients see when workers, Redis or its memory fail under them. Real processes; engine: scripted."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from broker import keys
from broker.client import Client
from supervisor import EXIT_CONFIG
from tests.support.stack import Stack, answers, connection, wait_until
from tests.support.told import expected
from tests.system.breaking import (
    Streams,
    complete,
    complete_when_ready,
    http_of,
    state_of,
    streams_of,
    until,
    until_async,
)

LEASE_S = "2"
POISON, DEADLY = "poison!", "deadly!"


@pytest.fixture(scope="module")
def tough() -> Iterator[Stack]:
    """Three workers; certain prompts kill a worker or its engine, and prefill takes its time."""
    stack = Stack(workers=3)
    script = ("--engine", "scripted", "--script-step-s", "0.01", "--script-prefill-token-s", "0.002")
    faults = ("--script-crash-text", POISON, "--script-dead-text", DEADLY)
    geometry = ("--max-context-tokens", "4096", "--prefill-chunk-tokens", "4096")
    stack.arguments["worker"] = (*script, *faults, *geometry, "--lease-s", LEASE_S, "--grace-s", "5")
    stack.arguments["former"] = ("--lease-s", LEASE_S)
    stack.arguments["api"] = ("--registry-age-s", "0.1")
    with stack:
        yield stack


@pytest_asyncio.fixture
async def streams(tough: Stack) -> AsyncIterator[Streams]:
    async with streams_of(tough) as streams:
        yield streams


@pytest_asyncio.fixture
async def http(tough: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with http_of(tough) as http:
        yield http


@pytest_asyncio.fixture
async def client(tough: Stack) -> AsyncIterator[Client]:
    client = await Client.open(tough.redis_url)
    yield client
    await client.close()


async def test_request_is_answered_once_when_its_worker_is_killed_before_the_first_token(
    tough: Stack, streams: Streams, client: Client
) -> None:
    workers = [name for name in tough.processes if name.startswith("worker")]
    for name in workers:
        tough.signal(name, signal.SIGSTOP)
    [told] = streams.start("claimed and not begun", length=30)
    await until(lambda: bool(told.request_id))

    async def is_claimed() -> bool:
        return bool(await state_of(client, told, "owner"))

    await until_async(is_claimed, "a worker owns the request")
    tough.kill(tough.name_of(await state_of(client, told, "owner")))
    for name in workers:
        if tough.processes[name].poll() is None:
            tough.signal(name, signal.SIGCONT)
    await streams.end()

    assert told.is_right, str(told)
    assert await state_of(client, told, "attempt") == "2"
    tough.restart_dead()
    wait_until(lambda: tough.accepting_workers() == 3, "three workers accept", timeout_s=30)


async def test_poison_among_good_requests_is_the_one_that_is_given_up(
    tough: Stack, streams: Streams, client: Client
) -> None:
    good = streams.start(*(f"good {i}" for i in range(7)), length=300)
    [bad] = streams.start(f"some {POISON}", length=20)

    with tough.supervised():
        await streams.end()
        wait_until(lambda: tough.accepting_workers() == 3, "three workers accept", timeout_s=30)

    assert [str(told) for told in good if not told.is_right] == []
    assert "crashed_workers" in bad.end
    letters: Any = await client.commands.xrange(keys.DEAD_LETTERS)
    assert [fields[b"id"].decode() for _, fields in letters] == [bad.request_id]


async def test_step_that_raises_ends_in_an_error_and_workers_that_exit_for_their_supervisor(
    tough: Stack, streams: Streams, http: httpx.AsyncClient
) -> None:
    [told] = streams.start(f"very {DEADLY}", length=20)

    await streams.end()
    codes = [tough.processes[f"worker-{i}"].wait(30) for i in range(3)]

    async def is_unready() -> bool:
        return (await http.get("/health")).status_code == 503

    await until_async(is_unready, "health goes unready")
    tough.restart_dead()
    wait_until(lambda: tough.accepting_workers() == 3, "three workers accept", timeout_s=30)

    assert told.is_broken_off, str(told)
    assert codes == [1, 1, 1]
    assert await complete_when_ready(http, "after", 5) == expected("after", 5)


async def test_worker_in_a_prefill_longer_than_its_lease_keeps_its_request_and_its_health(
    streams: Streams, http: httpx.AsyncClient, client: Client
) -> None:
    [told] = streams.start("p" * 2500, length=5)
    words = set()
    while told.end != "done":
        words.add((await http.get("/health")).json()["status"])
        assert told.end in ("nothing", "length", "done"), str(told)

    assert words == {"healthy"}
    assert told.is_right, str(told)
    assert await state_of(client, told, "attempt") == "1"


async def test_redis_killed_and_started_again_loses_nothing_that_waits_or_streams(
    tough: Stack, streams: Streams, http: httpx.AsyncClient, client: Client
) -> None:
    told = streams.start(*(f"kept {i}" for i in range(40)), length=150)
    await streams.grow(20, told[:8])

    tough.kill("redis")
    refused = await complete(http, "meanwhile", 5)
    tough.start_one("redis")
    await streams.end()

    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert [str(each) for each in told if not each.is_right] == []
    assert {await state_of(client, each, "attempt") for each in told} == {"1"}


async def test_log_that_lost_its_last_moments_shows_no_wrong_or_repeated_token(
    tough: Stack, streams: Streams, http: httpx.AsyncClient
) -> None:
    early = streams.start(*(f"early {i}" for i in range(12)), length=200)
    await streams.grow(40, early)
    [log] = (tough.folder / "appendonlydir").glob("*.incr.aof")
    kept = log.stat().st_size
    late = streams.start(*(f"late {i}" for i in range(6)), length=60)
    await streams.grow(10, late)
    await streams.grow(80, early)

    tough.kill("redis")
    _cut(log, kept)
    tough.start_one("redis")
    await streams.end()

    assert [str(each) for each in early if not each.is_right] == []
    assert [str(each) for each in late if not (each.is_right or each.is_broken_off)] == []
    assert any(each.is_broken_off for each in late), "nothing was undone"
    assert await complete_when_ready(http, "after", 5) == expected("after", 5)


async def test_redis_emptied_under_it_ends_streams_with_errors_and_daemons_recover(
    tough: Stack, streams: Streams, http: httpx.AsyncClient
) -> None:
    told = streams.start(*(f"flushed {i}" for i in range(12)), length=2000)
    await streams.grow(10)
    pids = {name: process.pid for name, process in tough.processes.items()}

    with connection(tough.redis_url) as redis:
        redis.flushall()
    await streams.end()
    answer = await complete_when_ready(http, "after", 5)

    assert [str(each) for each in told if not each.is_broken_off] == []
    assert answer == expected("after", 5)
    wait_until(lambda: tough.accepting_workers() == 3, "three workers accept", timeout_s=30)
    assert {name: process.pid for name, process in tough.processes.items()} == pids
    assert all(process.poll() is None for process in tough.processes.values())


async def test_redis_out_of_memory_is_a_503_and_no_crash(
    tough: Stack, streams: Streams, http: httpx.AsyncClient
) -> None:
    told = streams.start("before", length=100)
    await streams.grow(5)

    tough.configure_redis(maxmemory=1)
    refused = await complete(http, "meanwhile", 5)
    tough.configure_redis(maxmemory=0)
    await streams.end()

    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert [str(each) for each in told if not each.is_right] == []
    assert all(process.poll() is None for process in tough.processes.values())
    assert await complete_when_ready(http, "after", 5) == expected("after", 5)


@pytest.mark.parametrize("kind", ["api", "former", "worker"])
def test_daemon_refuses_to_start_on_a_redis_that_may_evict(tough: Stack, kind: str) -> None:
    wait_until(lambda: answers(tough.redis_url), "redis answers")
    tough.configure_redis(**{"maxmemory-policy": "allkeys-lru"})
    name = f"{kind}-late"
    if kind == "api":
        tough.ports[name] = 0
    try:
        tough.start_one(name)
        code = tough.processes.pop(name).wait(60)
    finally:
        tough.ports.pop(name, None)
        tough.configure_redis(**{"maxmemory-policy": "noeviction"})

    assert code == EXIT_CONFIG
    assert "maxmemory-policy = allkeys-lru" in (tough.folder / f"{name}.log").read_text()


def _cut(log: Path, size: int) -> None:
    assert log.stat().st_size > size
    with log.open("r+b") as file:
        file.truncate(size)
