"""A TCP proxy in front of Redis that cuts connections and loses pub/sub messages on demand."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from broker import tasks

CHUNK = 1 << 16
MESSAGE = b"*3\r\n$7\r\nmessage\r\n"
TERMINAL = (b"\xa8finished", b"\xa6failed")


class Proxy:
    """Listens on loopback and forwards every connection to the server's unix socket."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._to_lose = 0
        self.lost_messages = 0

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        while self._tasks:
            await tasks.end(*self._tasks)

    def cut(self) -> int:
        """Break every connection in the middle of whatever it carries; returns how many."""
        count = len(self._open)
        for writer in list(self._open):
            writer.transport.abort()
        return count

    def lose_last_messages(self, count: int) -> None:
        """The next so many pub/sub messages that carry an end do not arrive, though the connection stays whole."""
        self._to_lose = count

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        ends = {writer}
        ways: list[asyncio.Task[None]] = []
        try:
            upstream_reader, upstream = await asyncio.open_unix_connection(str(self._target))
            ends.add(upstream)
            self._open |= ends
            ways = [
                asyncio.create_task(self._forward(reader, upstream)),
                asyncio.create_task(self._forward_replies(upstream_reader, writer)),
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass  # the server is away, and so are we
        finally:
            for end in ends:
                end.transport.abort()
            await tasks.end(*ways)
            self._open -= ends
            self._tasks.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                writer.write(data)
                await writer.drain()

    async def _forward_replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                if self._to_lose and data.startswith(MESSAGE):
                    data = await self._without_last_message(data, reader)
                writer.write(data)
                await writer.drain()

    async def _without_last_message(self, data: bytes, reader: asyncio.StreamReader) -> bytes:
        """`data` starts one or several whole messages; drop those that carry an end, while any is to be lost."""
        kept = b""
        while data.startswith(MESSAGE):
            while (size := _message_size(data)) is None or size > len(data):
                # The server may die in the middle of a message; at the end of a stream reads return at once, for ever.
                if not (more := await reader.read(CHUNK)):
                    return kept
                data += more
            message, data = data[:size], data[size:]
            if self._to_lose and any(word in message for word in TERMINAL):
                self._to_lose -= 1
                self.lost_messages += 1
            else:
                kept += message
        return kept + data


def _message_size(data: bytes) -> int | None:
    """Bytes of the pub/sub message at the start of `data`; None when its head is not complete."""
    at = len(MESSAGE)
    for _ in range(2):
        end = data.find(b"\r\n", at)
        if end < 0:
            return None
        at = end + 2 + int(data[at + 1 : end]) + 2
    return at
