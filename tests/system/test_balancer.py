"""What stands between clients and servers in these tests must itself leave nothing open. Engine: none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from benchmarks.faults.proxy import Proxy
from harness.balancer import Balancer

ENDS_WITHIN_S = 10.0
HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Upstream:
    """Answers a health check and holds every other connection until its peer ends it."""

    def __init__(self) -> None:
        self.has_one = asyncio.Event()
        self.has_lost_it = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (await reader.readline()).startswith(b"GET /health"):
            writer.write(HEALTHY)
        else:
            self.has_one.set()
            with suppress(ConnectionResetError):
                await reader.read()
            self.has_lost_it.set()
        writer.close()


@asynccontextmanager
async def balanced(upstream: Upstream) -> AsyncIterator[int]:
    """A balancer in front of it; the port of the balancer."""
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    try:
        async with Balancer([server.sockets[0].getsockname()[1]]) as balancer:
            yield int(balancer.url.rpartition(":")[2])
    finally:
        server.close()


@asynccontextmanager
async def proxied(upstream: Upstream) -> AsyncIterator[int]:
    """A proxy in front of it; the port of the proxy."""
    with TemporaryDirectory(prefix="mtplx-") as folder:
        server = await asyncio.start_unix_server(upstream.serve, str(Path(folder) / "s"))
        proxy = Proxy(Path(folder) / "s")
        await proxy.start()
        try:
            yield proxy.port
        finally:
            await proxy.stop()
            server.close()


@pytest.mark.parametrize("between", [balanced, proxied])
async def test_connection_still_open_at_the_end_is_ended_on_both_sides(
    between: Callable[[Upstream], AbstractAsyncContextManager[int]],
) -> None:
    upstream = Upstream()
    async with asyncio.timeout(ENDS_WITHIN_S):
        async with between(upstream) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"hold\n")
            await upstream.has_one.wait()

        await upstream.has_lost_it.wait()
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
