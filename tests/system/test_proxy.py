"""The proxy that loses messages for the chaos run must itself never hang. Engine: none."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.faults.proxy import Proxy
from harness.wait import PATIENCE_S

END = b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$9\r\n\xa8finished\r\n"
NEWS = b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$4\r\nnews\r\n"


async def through_proxy(sent: bytes, *, losing: int) -> bytes:
    """What arrives of what a server sends before it closes."""

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await writer.drain()
        writer.close()

    with TemporaryDirectory(prefix="mtplx-") as folder:
        server = await asyncio.start_unix_server(serve, str(Path(folder) / "s"))
        proxy = Proxy(Path(folder) / "s")
        await proxy.start()
        proxy.lose_last_messages(losing)
        try:
            async with asyncio.timeout(PATIENCE_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
                try:
                    return await reader.read()
                except ConnectionResetError:
                    return b""
                finally:
                    writer.close()
        finally:
            await proxy.stop()
            server.close()


async def test_proxy_loses_messages_that_carry_an_end_and_no_others() -> None:
    assert await through_proxy(NEWS + END + NEWS, losing=1) == NEWS + NEWS


async def test_proxy_ends_when_the_server_dies_in_the_middle_of_a_message() -> None:
    assert await through_proxy(NEWS + END[:-10], losing=1) in (NEWS, b"")
