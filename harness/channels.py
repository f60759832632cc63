"""Listens to a channel for the length of a test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.client import PubSub

from harness.redis_servers import Server
from harness.wait import PATIENCE_S


class Ear:
    """What was published on one channel since the subscription was confirmed."""

    def __init__(self, pubsub: PubSub) -> None:
        self._pubsub = pubsub

    async def hear(self) -> bytes:
        """The next message."""
        message = await self._pubsub.get_message(ignore_subscribe_messages=True, timeout=PATIENCE_S)
        assert message is not None, "nothing was published"
        return cast("bytes", message["data"])


@asynccontextmanager
async def listening(server: Server, channel: str) -> AsyncIterator[Ear]:
    """An ear on a channel, confirmed before the block begins."""
    client: Redis = server.client(blocking=True)
    async with client.pubsub() as pubsub:
        await cast("Any", pubsub.subscribe(channel))
        confirmation = await pubsub.get_message(timeout=PATIENCE_S)
        assert confirmation is not None
        yield Ear(pubsub)
    await client.aclose()
