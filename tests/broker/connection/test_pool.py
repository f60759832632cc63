"""Callers wait for a connection in turn; none is lost with a caller that is cancelled. Engine: none; Redis: redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from broker.connection.connect import connect
from tests.broker.conftest import ChildServers

PLACES = 2


@pytest.fixture
async def narrow(child_servers: ChildServers) -> AsyncIterator[Redis]:
    """A client of two connections."""
    server = child_servers.get("redis")
    server.flush()
    client = connect(server.url, connections=PLACES)
    yield client
    await client.aclose()


async def test_burst_waits_its_turn_over_few_connections(narrow: Redis) -> None:
    counts = await asyncio.gather(*(narrow.incr("n") for _ in range(300)))
    clients = await cast("Any", narrow).client_list()

    assert sorted(counts) == list(range(1, 301))
    assert len(clients) == PLACES
    await narrow.delete("n")


async def test_no_place_is_lost_with_callers_that_are_cancelled(narrow: Redis) -> None:
    for turns in range(60):
        calls = [asyncio.create_task(cast("Any", narrow).ping()) for _ in range(8)]
        for _ in range(turns % 20):
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    held = [asyncio.create_task(cast("Any", narrow).blpop("none", timeout=0.5)) for _ in range(PLACES)]
    assert await asyncio.gather(*held) == [None] * PLACES


async def test_place_of_a_connection_that_cannot_be_made_is_given_back() -> None:
    away = connect("unix:///nowhere/redis.sock", connections=1)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(30):
                await _ping(away)


async def _ping(client: Redis) -> None:
    try:
        await cast("Any", client).ping()
    except Exception as error:
        raise ConnectionError from error
