"""A bounded pool of connections whose callers wait their turn, as long as they like; each brings a limit of its own.

redis-py's blocking pool gives a caller up after a fixed time, and may lose a connection, or the turn of the next in
line, when a caller is cancelled at the wrong moment. Here a place is given back whatever happens.
"""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio.connection import AbstractConnection, ConnectionPool

_NO_BOUND = 2**31


class WaitingPool(ConnectionPool):
    """At most `places` connections are in use at once."""

    def __init__(self, *, places: int, **options: Any) -> None:
        super().__init__(**{**options, "max_connections": _NO_BOUND})
        self._places = asyncio.Semaphore(places)
        self._lent: set[AbstractConnection] = set()

    async def get_connection(self, command_name: str | None = None, *keys: Any, **options: Any) -> AbstractConnection:
        """A connected connection, once there is a place."""
        untyped: Any = super()
        await self._places.acquire()
        try:
            connection: AbstractConnection = await untyped.get_connection()
        except BaseException:
            self._places.release()
            raise
        self._lent.add(connection)
        return connection

    async def release(self, connection: AbstractConnection) -> None:
        """Give a connection and its place back."""
        is_lent = connection in self._lent
        self._lent.discard(connection)
        try:
            await super().release(connection)
        finally:
            self._in_use_connections.discard(connection)
            if is_lent:
                self._places.release()
