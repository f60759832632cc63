"""A way to a child server on which connections can go dead without a word to either end, as over a lost route."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from redis.asyncio import Redis

from broker.connection.connect import connect
from harness.redis_servers import ChildServer


class Relay:
    """Hands out clients as a server does."""

    def __init__(self, server: ChildServer, folder: Path) -> None:
        self.name = server.name
        self.path = folder / "relay"
        self._target = server.url.removeprefix("unix://")
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()

    def client(self, *, blocking: bool = False) -> Redis:
        return connect(f"unix://{self.path}", blocking=blocking)

    def lose_connections(self) -> None:
        """Whatever comes over a connection that stands by now is thrown away; new ones work."""
        self._open.clear()
        self._open = asyncio.Event()
        self._open.set()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        is_open = self._open
        server_reader, server_writer = await asyncio.open_unix_connection(self._target)
        self._writers |= {writer, server_writer}
        await asyncio.gather(_pass_on(reader, server_writer, is_open), _pass_on(server_reader, writer, is_open))
        self._writers -= {writer, server_writer}

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_open: asyncio.Event) -> None:
    while data := await reader.read(1 << 16):
        if is_open.is_set():
            writer.write(data)
    writer.close()


@asynccontextmanager
async def relayed(server: ChildServer) -> AsyncIterator[Relay]:
    """A relay in front of a server, for the length of a block."""
    folder = Path(tempfile.mkdtemp(prefix="mtplx-"))
    relay = Relay(server, folder)
    listener = await asyncio.start_unix_server(relay.take, relay.path)
    try:
        yield relay
    finally:
        listener.close()
        relay.close()
        shutil.rmtree(folder, ignore_errors=True)
