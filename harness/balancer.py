"""A TCP balancer that obeys `/health`, as one in front of several API processes does."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from types import TracebackType

import httpx

from broker import tasks

CHUNK = 1 << 16
LOOK_S = 0.1
CONNECT_TRIES = 200


class Balancer:
    """Every connection goes to a process that says it is healthy; one that refuses it is passed over."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = list(ports)
        self._healthy: set[int] = set()
        self._server: asyncio.Server | None = None
        self._watch: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Balancer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._watch = asyncio.create_task(self._look_for_ever(), name="balancer-health")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._server is not None
        assert self._watch is not None
        self._server.close()
        await tasks.end(self._watch)
        while self._connections:  # one that was accepted just now may have begun meanwhile
            await tasks.end(*self._connections)

    async def _look_for_ever(self) -> None:
        async with httpx.AsyncClient(verify=False, timeout=1) as http:
            while True:
                for port in self._ports:
                    await self._look(http, port)
                await asyncio.sleep(LOOK_S)

    async def _look(self, http: httpx.AsyncClient, port: int) -> None:
        try:
            is_healthy = (await http.get(f"http://127.0.0.1:{port}/health")).status_code == 200
        except httpx.TransportError:
            is_healthy = False
        (self._healthy.add if is_healthy else self._healthy.discard)(port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        ends = [writer]
        try:
            upstream_reader, upstream = await self._connect()
            ends.append(upstream)
            await asyncio.gather(_forward(reader, upstream), _forward(upstream_reader, writer))
        except BaseException:
            for end in ends:
                end.transport.abort()  # a way that was ended in the middle has closed nothing
            raise
        finally:
            self._connections.discard(task)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Healthy ones first; while there is none, the client waits."""
        for _ in range(CONNECT_TRIES):
            for port in random.sample(sorted(self._healthy), len(self._healthy)):
                with contextlib.suppress(OSError):
                    return await asyncio.open_connection("127.0.0.1", port)
            await asyncio.sleep(LOOK_S)
        raise ConnectionError("nobody is healthy")


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()
