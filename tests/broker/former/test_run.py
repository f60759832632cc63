"""The former as a running daemon: woken, stopped, two at once, Redis away. Engine: none; Redis: as each test says."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis

from broker import keys
from broker.errors import BrokerUnavailableError
from broker.former.daemon import Former, FormerConfig
from broker.registry import Registry
from broker.scripts import DEFAULT_BOUNDS, Scripts
from harness import factories as make
from harness.reads import read_counts, read_free_rows, read_jobs, read_status
from harness.redis_servers import ChildServer, Server, ServerName, child_server
from harness.running import accept, run_rows
from harness.wait import PATIENCE_S, wait_until

NEVER_S = 3600.0


@asynccontextmanager
async def running(server: Server, config: FormerConfig) -> AsyncIterator[Former]:
    """A former at work, until the block ends."""
    commands, blocking = server.client(), server.client(blocking=True)
    former = Former(config, commands=commands, blocking=blocking)
    task = asyncio.create_task(former.run())
    try:
        yield former
    finally:
        former.stop()
        await task
        await commands.aclose()
        await blocking.aclose()


@pytest.fixture(params=["valkey", "redis"])
def durable_server(request: pytest.FixtureRequest) -> Iterator[ChildServer]:
    """A server that can be killed and started again without losing anything."""
    name: ServerName = request.param
    with child_server(name, is_durable=True) as server:
        yield server


async def test_former_is_woken_when_a_request_is_accepted(server: Server, scripts: Scripts, client: Redis) -> None:
    await scripts.register(make.registration("w1"))

    async with running(server, FormerConfig("unused", tick_s=NEVER_S, lease_s=NEVER_S)) as former:
        await wait_until(lambda: is_idle(client, former), "the former has looked once and listens")
        await accept(scripts, "r1")

        await wait_until(lambda: has_status(client, "r1", "running"), "the request is sent")


async def test_former_is_woken_when_a_row_becomes_free(server: Server, scripts: Scripts, client: Redis) -> None:
    await scripts.register(make.registration("w1", free_rows=1))
    await accept(scripts, "r1", "r2")

    async with running(server, FormerConfig("unused", tick_s=NEVER_S, lease_s=NEVER_S)):
        await wait_until(lambda: has_status(client, "r1", "running"), "the first is sent")
        await scripts.hand_back("w1", [(await read_jobs(client, "w1"))[0][0]], is_crash=False)
        await scripts.cancel("r1", "client")

        await wait_until(lambda: has_status(client, "r2", "running"), "the second is sent")


async def test_former_is_woken_again_after_uvloop_lost_its_connection(
    server: Server, client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocking = server.client(blocking=True)
    lost = ["unable to perform operation on <TCPTransport closed=True reading=False>; the handler is closed"]
    pubsub = blocking.pubsub

    def lose_once() -> Any:
        if lost:
            raise RuntimeError(lost.pop())
        return pubsub()

    monkeypatch.setattr(blocking, "pubsub", lose_once)
    former = Former(FormerConfig("unused", tick_s=NEVER_S, lease_s=NEVER_S), commands=client, blocking=blocking)
    task = asyncio.create_task(former.run())

    try:
        await wait_until(lambda: is_idle(client, former), "the former listens")
    finally:
        former.stop()
        await task
        await blocking.aclose()


async def test_former_leaves_at_once_when_it_is_stopped(server: Server, client: Redis, registry: Registry) -> None:
    async with running(server, FormerConfig("unused", tick_s=NEVER_S, lease_s=NEVER_S)) as former:
        await wait_until(lambda: is_idle(client, former), "the former works")

    assert await registry.daemons() == []
    await wait_until(lambda: is_lease_free(client), "the lease is free")


async def test_two_formers_send_every_request_once(server: Server, scripts: Scripts, client: Redis) -> None:
    for i in range(4):
        await scripts.register(make.registration(f"w{i}", free_rows=12))
    await accept(scripts, *(f"r{i}" for i in range(40)))
    commands = [server.client() for _ in range(2)]
    formers = [Former(FormerConfig("unused"), commands=each, blocking=each) for each in commands]

    sent = await asyncio.gather(*(form_often(former) for former in formers))

    seats = [seat for i in range(4) for job in await read_jobs(client, f"w{i}") for seat in job]
    assert sum(sent) == len(seats) == 40
    assert {seat.attempt for seat in seats} == {1}
    assert len({seat.request_id for seat in seats}) == 40
    assert sum([await read_free_rows(client, f"w{i}") for i in range(4)]) == 8
    for each in commands:
        await each.aclose()


async def test_former_goes_on_when_redis_was_killed_and_started_again(durable_server: ChildServer) -> None:
    client = durable_server.client()
    scripts = Scripts(client)
    async with running(durable_server, FormerConfig("unused", tick_s=0.05, lease_s=2.0)):
        await run_rows(scripts, "r1")
        durable_server.kill()
        durable_server.start()
        await accept(scripts, "r2")

        await wait_until(lambda: has_status(client, "r2", "running"), "the former forms again")

    assert await read_status(client, "r1") == "running"
    assert await read_counts(client, keys.rows("w1")) == {"r1": 1, "r2": 1}
    await client.aclose()


async def test_former_reads_anew_what_waits_when_redis_came_back_as_another(durable_server: ChildServer) -> None:
    """The new run's clock is behind, and it has as many entries as the former had read: nothing else tells them."""
    client: Any = durable_server.client()
    scripts = Scripts(client)
    seconds = itertools.count(0.0, 100.0)
    config = FormerConfig("unused", lease_s=1000.0)
    former = Former(config, commands=client, blocking=client, monotonic=lambda: next(seconds))
    await scripts.accept(make.submission("gone", ticket=make.ticket("gone", model="nobody@1")), DEFAULT_BOUNDS)
    await former.step()
    await client.delete(keys.WAIT_INTERACTIVE)
    await accept(scripts, "r1")
    [(_, entry)] = await client.xrange(keys.WAIT_INTERACTIVE)
    await client.delete(keys.WAIT_INTERACTIVE)
    await client.xadd(keys.WAIT_INTERACTIVE, entry, id="1-1")
    await client.hset(keys.state("r1"), "entry", "1-1")
    durable_server.kill()
    durable_server.start()
    await scripts.register(make.registration("w1"))

    async def is_sent() -> bool:
        await former.step()
        return await has_status(client, "r1", "running")

    await wait_until(is_sent, "the request is sent")
    await client.aclose()


async def test_former_process_ends_when_it_is_told_to(durable_server: ChildServer) -> None:
    client = durable_server.client()
    run = f"asyncio.run(run_former(FormerConfig({durable_server.url!r})))"
    code = f"import asyncio; from broker.former.daemon import *; {run}"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, cwd=os.getcwd())
    await wait_until(lambda: has_former(client), "the former is registered")

    process.send_signal(signal.SIGTERM)

    assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
    assert await Registry(client).daemons() == []
    await client.aclose()


async def form_often(former: Former) -> int:
    return sum([await former.form() for _ in range(8)])


async def has_status(client: Redis, request_id: str, status: str) -> bool:
    return await read_status(client, request_id) == status


async def has_former(client: Redis) -> bool:
    return [record.kind for record in await Registry(client).daemons()] == ["former"]


async def is_idle(client: Redis, former: Former) -> bool:
    return former.is_working and bool(await client.pubsub_numsub(keys.WAKE) == [(keys.WAKE.encode(), 1)])


async def is_lease_free(client: Redis) -> bool:
    return await client.get(keys.FORMER_LEASE) is None


async def test_former_tries_again_well_within_a_lease(
    server: Server, client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = FormerConfig("unused", lease_s=0.5)
    former = Former(config, commands=client, blocking=server.client(blocking=True))
    limits: list[float] = []
    timeout = asyncio.timeout

    async def away() -> int:
        if len(limits) == 2:
            former.stop()
        raise BrokerUnavailableError("away")

    def note(delay_s: float) -> asyncio.Timeout:
        limits.append(delay_s)
        return timeout(0.0)

    monkeypatch.setattr(former, "step", away)
    monkeypatch.setattr("broker.former.daemon.asyncio.timeout", note)
    await former.run()

    assert len(limits) == 3
    assert max(limits) <= 0.25 * config.lease_s
