"""ASGI responses that own their request: whatever ends them, the client leaving included, the answer is released."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from litestar.types import HTTPResponseBodyEvent, HTTPResponseStartEvent, Receive, Scope, Send

from api.calls.collect import collect
from api.calls.prepare import PreparedCall
from api.calls.stream import Answer, CallFault, Delta, End, Item, PrefillUpdate
from api.errors import ApiError
from api.openai.formats import DONE, Format, comment, error_body, error_event, sum_usage
from broker.wire import Cause

logger = logging.getLogger(__name__)

Headers = Mapping[str, str]


class JsonResponse:
    """A body that is ready."""

    def __init__(self, body: bytes, *, status: int = 200, headers: Headers | None = None) -> None:
        self.body = body
        self.status = status
        self.headers: Headers = headers or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_whole(send, self.body, status=self.status, headers=self.headers)


class _Writer(Protocol):
    async def __call__(self, send: Send) -> None: ...


class StreamedAnswer:
    """Server-sent events: headers at once, comments in silence, one `[DONE]` if all went well."""

    def __init__(
        self,
        answer: Answer,
        style: Format,
        job: PreparedCall,
        *,
        headers: Headers,
        keep_alive_s: float,
        has_usage: bool,
    ) -> None:
        self._answer = answer
        self._style = style
        self._job = job
        self._headers = headers
        self._keep_alive_s = keep_alive_s
        self._has_usage = has_usage
        self._ends: list[End] = []
        self._progress = "keep-alive"
        """What is said in silence."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await run_until_gone(self._write, self._answer, receive=receive, send=send)

    async def _write(self, send: Send) -> None:
        await send(_start(200, {**_SSE_HEADERS, **self._headers}))
        await send(_body(b"".join(self._style.opening(index) for index in range(len(self._job.works))), more=True))
        clock = asyncio.get_running_loop().time
        sent_s = clock()
        while len(self._ends) < len(self._job.works):
            items = await self._answer.next_items(max(0.0, sent_s + self._keep_alive_s - clock()))
            if (fault := next((item for item in items if isinstance(item, CallFault)), None)) is not None:
                before = items[: items.index(fault)]
                await send(_body(self._frames(before) + error_event(fault.error), more=False))
                return
            frames = self._frames(items)
            if not frames and clock() - sent_s >= self._keep_alive_s:
                frames = comment(self._progress)
            if frames:
                await send(_body(frames, more=True))
                sent_s = clock()
        last = self._style.usage(sum_usage(self._job, self._ends)) if self._has_usage else b""
        await send(_body(last + DONE, more=False))

    def _frames(self, items: list[Item]) -> bytes:
        return b"".join([self._frame(item) for item in items])

    def _frame(self, item: Item) -> bytes:
        match item:
            case Delta():
                self._progress = "keep-alive"
                return self._style.delta(item)
            case End():
                self._ends.append(item)
                return self._style.end(item)
            case PrefillUpdate(_, done, total):
                self._progress = f"prefill {done}/{total}"
                return b""
            case CallFault():
                return b""


class WholeAnswer:
    """One JSON body once everything has ended."""

    def __init__(self, answer: Answer, style: Format, job: PreparedCall, *, headers: Headers) -> None:
        self._answer = answer
        self._style = style
        self._job = job
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await run_until_gone(self._write, self._answer, receive=receive, send=send)

    async def _write(self, send: Send) -> None:
        try:
            choices = await collect(self._answer, len(self._job.works))
        except ApiError as error:
            await send_whole(send, error_body(error), status=error.status, headers=error.headers)
            return
        usage = sum_usage(self._job, [choice.end for choice in choices if choice.end is not None])
        await send_whole(send, self._style.whole(choices, usage), headers=self._headers)


async def run_until_gone(write: _Writer, answer: Answer, *, receive: Receive, send: Send) -> None:
    """Write an answer until it is written or the client has left, then release it."""
    writer = asyncio.create_task(_call(write, send), name="answer-writer")
    watcher = asyncio.create_task(_until_gone(receive), name="disconnect-watcher")
    cause: Cause = "client"
    try:
        await asyncio.wait({writer, watcher}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        cause = "shutdown"  # only the server's end cancels a response
        raise
    finally:
        is_written = writer.done()
        writer.cancel()
        watcher.cancel()
        answer.release(cause)
    if is_written:
        await writer
    await asyncio.gather(writer, watcher, return_exceptions=True)


async def send_whole(send: Send, body: bytes, *, status: int = 200, headers: Headers | None = None) -> None:
    fields = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    await send(_start(status, fields))
    await send(_body(body, more=False))


_SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


async def _call(write: _Writer, send: Send) -> None:
    await write(send)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(status: int, headers: Headers) -> HTTPResponseStartEvent:
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}


def _body(data: bytes, *, more: bool) -> HTTPResponseBodyEvent:
    return {"type": "http.response.body", "body": data, "more_body": more}
