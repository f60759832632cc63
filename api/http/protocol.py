"""The HTTP/1.1 protocol of one connection: uvicorn's, with a bound on how long a request may take to arrive.

It also serves clients that offer to go over to HTTP/2 in the clear: the offer is ignored, as HTTP allows.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import ClassVar

import httptools
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from api.errors import ApiError
from api.openai.formats import error_body
from broker.connection.connect import keepalive_options

logger = logging.getLogger(__name__)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A head must be whole within the bound, a body must not pause for longer."""

    receive_timeout_s: ClassVar[float] = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        _end_when_vanished(transport.get_extra_info("socket"))
        self._is_arriving = self._is_head = True
        self._has_offer = False
        """Whether the head that was read last offers another protocol."""
        self._began_s = self._heard_s = self.loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._heard_s = self.loop.time()
        offset = None
        try:
            self._unset_keepalive_if_required()
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            offset = upgrade.args[0]
        except httptools.HttpParserError as error:
            logger.debug("a request that is no HTTP: %s", error)
            self._refuse(400, "This is not a valid HTTP/1.1 request.")
        if offset is not None and self._has_offer:
            self._begin_again(data[offset:])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_arriving = self._is_head = True
        self._began_s = self.loop.time()
        if self._timer is None:
            self._watch()

    def on_headers_complete(self) -> None:
        self._is_head = False
        self._has_offer = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._has_offer:
            return
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            _send_unchunked(self.cycle)

    def on_message_complete(self) -> None:
        if not self._has_offer:
            self._is_arriving = False
            super().on_message_complete()

    def _begin_again(self, rest: bytes) -> None:
        """Read the request once more without its offer, because the parser takes no body behind one."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [name + b": " + value for name, value in self.headers if name not in (b"connection", b"upgrade")]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def _watch(self) -> None:
        """Give the request up once it has been too long on its way, or look again when it may have been."""
        self._timer = None
        if not self._is_arriving or self.transport.is_closing():
            return
        now_s = self.loop.time()
        since_s = self._began_s if self._is_head else self._heard_s
        if not self._is_head and (self.flow.read_paused or self._is_answering()):
            since_s = now_s  # this side does not read, or has something to say first
        left_s = since_s + self.receive_timeout_s - now_s
        if left_s > 0:
            self._timer = self.loop.call_later(left_s, self._watch)
        else:
            logger.debug("a request that did not arrive within %g s is given up", self.receive_timeout_s)
            self._refuse(408, f"The request did not arrive within {self.receive_timeout_s:g} s.")

    def _is_answering(self) -> bool:
        return self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete

    def _refuse(self, status: int, message: str) -> None:
        """Answer, unless another answer is under way or this request has had one, and close."""
        is_answered = self.cycle is not None and not self._is_head and self.cycle.response_complete
        if not self._is_answering() and not is_answered:
            body = error_body(ApiError(message, status=status, kind="invalid_request_error"))
            head = (
                f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


def _end_when_vanished(connection: socket.socket) -> None:
    """Have the system ask now and then whether a silent client is still there, and end the connection if not.

    There is no bound on how long data may lie unread: a client may stop reading a stream for as long as it likes.
    """
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in keepalive_options().items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _send_unchunked(cycle: RequestResponseCycle) -> None:
    """Have an answer of unknown length end with its connection; HTTP/1.0 knows no chunks, which uvicorn would send."""
    send = cycle.send

    async def send_plain(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.chunked_encoding = False
    cycle.send = send_plain  # type: ignore[method-assign]  # uvicorn has no other place for it


_PHRASES = {400: "Bad Request", 408: "Request Timeout"}


def bounded_protocol(receive_timeout_s: float) -> type[BoundedProtocol]:
    """The protocol with its bound, as uvicorn takes it."""
    return type("BoundedProtocol", (BoundedProtocol,), {"receive_timeout_s": receive_timeout_s})
