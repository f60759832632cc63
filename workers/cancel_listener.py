"""Listens to the control channel, which only wakes: what somebody wants ended stands in the request's state."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from broker import keys
from broker.connection.connect import translated

PATIENCE_S = 5.0


class ControlListener:
    """One subscription; `step` waits for a message, and anew after a connection was lost."""

    def __init__(self, blocking: Redis, on_wake: Callable[[], None]) -> None:
        self._client = blocking
        self._on_wake = on_wake
        self._pubsub: Any = None

    async def step(self) -> None:
        """Wait a while for a message and pass it on.

        Raises:
            BrokerUnavailableError: Redis is away.
        """
        try:
            with translated():
                await self._listen()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        pubsub, self._pubsub = self._pubsub, None
        if pubsub is not None:
            with contextlib.suppress(RedisError, OSError):
                await pubsub.aclose()

    async def _listen(self) -> None:
        if self._pubsub is None:
            self._pubsub = self._client.pubsub()
            async with asyncio.timeout(PATIENCE_S):
                await self._pubsub.subscribe(keys.CONTROL)
            self._on_wake()  # for what was said while nobody listened
        message = await self._pubsub.get_message(timeout=PATIENCE_S)
        if message is not None:
            self._on_wake()
