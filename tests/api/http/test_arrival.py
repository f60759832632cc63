"""Requests on their way, byte by byte on a socket: half of one, an old version, an offer of a newer one. No engine."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from broker.connection.connect import keepalive_options
from tests.api.conftest import api_config, serving, wait_until
from tests.api.fake import NAME, FakeBackend

pytestmark = pytest.mark.asyncio(loop_scope="session")

BODY = json.dumps({"model": NAME, "messages": [{"role": "user", "content": "Hello"}]}).encode()
HALF_GZIP = gzip.compress(BODY)[:20]
STREAM = json.dumps({"model": NAME, "prompt": "Hello", "stream": True}).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SIZED = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY)
UPLOAD = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"
QUICK_S = 0.1
LONG_S = 20.0
CLIENTS = 300


@pytest_asyncio.fixture(loop_scope="session")
async def impatient(backend: FakeBackend) -> AsyncIterator[int]:
    """The port of a server that waits for requests a moment only."""
    async with serving(backend, api_config(receive_timeout_s=QUICK_S)) as url:
        yield port_of(url)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def say(port: int, data: bytes) -> bytes:
    """What the server answers until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    async with asyncio.timeout(LONG_S):
        answer = await reader.read()
    writer.close()
    return answer


async def converse(port: int, data: bytes) -> bytes:
    """What the server answers to a request, which asks it to close then."""
    return await say(port, data.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))


def body_of(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    "half",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"P", id="a letter"),
        pytest.param(HEAD, id="half a head"),
        pytest.param(SIZED, id="a head"),
        pytest.param(SIZED + BODY[:-1], id="all but a byte"),
        pytest.param(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", id="half a chunk"),
        pytest.param(
            HEAD + b"Content-Encoding: gzip\r\nContent-Length: 99\r\n\r\n" + gzip.compress(BODY)[:20], id="gzip"
        ),
        pytest.param(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /heal", id="half a second request"),
        pytest.param(
            b"DELETE /v1/files/f HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n", id="a body not read"
        ),
    ],
)
async def test_half_a_request_is_given_up(impatient: int, half: bytes) -> None:
    answer = await say(impatient, half)

    if b"HTTP/1.1 408" in answer:
        assert json.loads(body_of(answer).rpartition(b"\r\n\r\n")[2] or body_of(answer))["error"]["message"]
    else:
        assert half.startswith((b"GET", b"DELETE"))
        assert answer.startswith(b"HTTP/1.1 ")


async def test_request_that_is_whole_is_answered_however_long_that_takes(impatient: int, backend: FakeBackend) -> None:
    backend.gate.clear()
    asyncio.get_running_loop().call_later(3 * QUICK_S, backend.gate.set)

    answer = await converse(impatient, SIZED + BODY)

    assert answer.startswith(b"HTTP/1.1 200")


async def test_body_may_take_long_while_it_keeps_coming(impatient: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", impatient)
    writer.write(SIZED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    for byte in BODY:
        writer.write(bytes([byte]))
        await asyncio.sleep(QUICK_S / 20)

    assert (await reader.read()).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_idle_connection_between_requests_is_kept(impatient: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", impatient)
    for _ in range(2):
        writer.write(SIZED + BODY)
        head = await reader.readuntil(b"\r\n\r\n")
        size = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(int(size.partition(b":")[2]))
        await asyncio.sleep(2 * QUICK_S)
    writer.close()


async def test_connection_asks_whether_a_silent_client_is_still_there(impatient: int) -> None:
    """One that vanished, such as a laptop whose lid was closed, would else be waited for without end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", impatient)
    writer.write(SIZED + BODY)
    await reader.readuntil(b"\r\n\r\n")

    with server_side(writer.get_extra_info("sockname")) as connection:
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        for option, value in keepalive_options().items():
            assert connection.getsockopt(socket.IPPROTO_TCP, option) == value
    assert 0 < sum(keepalive_options().values()) <= 60
    writer.close()


@contextmanager
def server_side(client: tuple[str, int]) -> Iterator[socket.socket]:
    """The server's end of a connection within this process."""
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family == socket.AF_INET and connection.getpeername() == client:
                yield connection
                return
    raise AssertionError("no connection of the server's has this client")


@pytest.mark.parametrize("head", [SIZED, UPLOAD + b"Content-Length: 999\r\n\r\n"], ids=["json", "upload"])
async def test_clients_that_leave_in_the_middle_of_a_body_are_no_errors(
    backend: FakeBackend, caplog: pytest.LogCaptureFixture, tmp_path: Path, head: bytes
) -> None:
    caplog.set_level(logging.DEBUG)

    async with serving(backend, api_config(files_url=str(tmp_path))) as url:
        for _ in range(CLIENTS):
            _, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
            writer.write(head + BODY[:20])
            writer.close()
        await wait_until(lambda: sum("the client left" in record.message for record in caplog.records) == CLIENTS)

    assert [record for record in caplog.records if record.levelno > logging.INFO or record.exc_info] == []
    assert backend.submitted == []
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


async def test_answer_to_http_1_0_ends_with_its_connection(url: str) -> None:
    answer = await say(port_of(url), (SIZED + BODY).replace(b"HTTP/1.1", b"HTTP/1.0"))

    assert answer.startswith(b"HTTP/1.1 200")
    assert json.loads(body_of(answer))["object"] == "chat.completion"


async def test_stream_to_http_1_0_is_not_cut_into_chunks(url: str) -> None:
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(STREAM)

    answer = await say(port_of(url), head + STREAM)

    assert b"transfer-encoding" not in answer.lower()
    assert body_of(answer).startswith(b"data: {")
    assert answer.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("step", [1, 50, 10_000], ids=["by the byte", "in pieces", "at once"])
@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket", b"TLS/1.0"])
async def test_body_behind_an_offer_of_another_protocol_is_read(
    url: str, backend: FakeBackend, upgrade: bytes, step: int
) -> None:
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: " + upgrade + b"\r\nHTTP2-Settings: AAMAAABk\r\n"
    data = SIZED.replace(b"Content-Type", offer + b"Content-Type") + BODY
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
    for start in range(0, len(data), step):
        writer.write(data[start : start + step])
        await asyncio.sleep(0)

    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    assert len(backend.submitted) == 1
    writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"FOO /health HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/3\r\n\r\n",
    ],
    ids=["HTTP/2", "an unknown method", "TLS", "an unknown version"],
)
async def test_what_is_not_http_1_is_refused_in_the_shape_of_errors(
    url: str, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    answer = await say(port_of(url), data)

    assert answer.startswith(b"HTTP/1.1 400")
    assert "HTTP/1.1" in json.loads(body_of(answer))["error"]["message"]
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


async def test_request_for_a_whole_address_is_served(url: str) -> None:
    answer = await converse(
        port_of(url), b"GET http://localhost:8000/v1/models HTTP/1.1\r\nHost: localhost:8000\r\n\r\n"
    )

    assert answer.startswith(b"HTTP/1.1 200")


async def test_body_that_is_asked_for_first_is_read(url: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
    writer.write(SIZED.replace(b"Content-Type", b"Expect: 100-continue\r\nContent-Type"))
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
    writer.write(BODY)

    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
