"""One line of a batch on the queue: submitted under an id that is the same in every attempt, waited for, written down.

A runner that comes after a killed one submits the same lines again; what had been accepted is found, not run again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from api.batch_lines import Line
from api.batch_parts import Result
from api.batch_schemas import Endpoint
from api.errors import ApiError, BusyError
from api.formats import error_body
from api.text_calls import TextCall, Whole
from api.text_client import Terms, TextClient
from broker.errors import BrokerUnavailableError, ConflictError, QueueFullError
from broker.wire import Cause

logger = logging.getLogger(__name__)

AGAIN = frozenset({"lost", "diverged", "over_capacity", "no_worker", "shutdown"})
"""How a request may fail through no fault of its own; it is submitted anew then."""
ATTEMPTS = 5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
KEEP_S = 24 * 3600.0
"""How long an answer waits in Redis for a runner to write it down, should all runners be away."""


class _Response(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _LineError(msgspec.Struct, frozen=True):
    code: str
    message: str


class _ResultLine(msgspec.Struct, frozen=True):
    id: str
    custom_id: str
    response: _Response | None
    error: _LineError | None


_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Ground:
    """What all lines of a batch stand on."""

    batch_id: str
    endpoint: Endpoint
    key_id: str
    remaining_s: Callable[[], float]
    """Until the batch's window closes."""
    may_submit: Callable[[], Awaitable[None]]
    """Returns once this runner is sure that the batch is its own."""
    on_wait: Callable[[str], None]
    """Told what a line waits for, and the empty text once it does not."""


class LineCall:
    """Runs one line to its result."""

    def __init__(self, text: TextClient, ground: Ground, line: Line) -> None:
        self._text = text
        self._ground = ground
        self._line = line
        self._call: TextCall | None = None

    async def run(self) -> Result:
        """The line's result, whatever becomes of it."""
        attempt = 0
        while True:
            try:
                call = await self._submit(self._id(attempt))
                whole = await call.whole()
            except ApiError as error:
                if error.code in AGAIN and attempt + 1 < ATTEMPTS:
                    attempt += 1
                    continue
                if error.code == "deadline_exceeded":
                    return expired_result(self._ground.batch_id, self._line)
                return self._refused(error, self._id(attempt))
            return self._answered(call, whole)

    async def cancel(self, cause: Cause) -> None:
        """Have its requests end, if it has any."""
        if self._call is not None:
            await self._call.cancel(cause)

    async def _submit(self, call_id: str) -> TextCall:
        """Until the queue has taken it. Raises: ApiError."""
        pause_s = FIRST_PAUSE_S
        while True:
            await self._ground.may_submit()
            terms = Terms(
                call_id=call_id,
                deadline_s=max(1.0, self._ground.remaining_s()),
                keep_s=KEEP_S,
                key_id=self._ground.key_id,
                is_noted=False,
            )
            try:
                self._call = await self._accept(terms)
            except (BusyError, QueueFullError, BrokerUnavailableError) as error:
                self._ground.on_wait(str(error))
            else:
                self._ground.on_wait("")
                return self._call
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    async def _accept(self, terms: Terms) -> TextCall:
        try:
            return await self._text.submit(self._ground.endpoint, self._line.body, terms)
        except ConflictError:
            # A template that says the date renders otherwise than it did for the runner before.
            return await self._text.join(self._ground.endpoint, self._line.body, terms)

    def _answered(self, call: TextCall, whole: Whole) -> Result:
        if "cancelled" in whole.reasons:
            return _failed(self._ground.batch_id, self._line, "request_cancelled", "The request was cancelled.")
        if "deadline" in whole.reasons:
            return expired_result(self._ground.batch_id, self._line)
        response = _Response(200, call.id, msgspec.Raw(whole.body))
        return Result(
            number=self._line.number,
            kind="output",
            data=_encode(self._ground.batch_id, self._line, response, None),
            input_tokens=whole.usage.prompt_tokens,
            output_tokens=whole.usage.completion_tokens,
            request_ids=[work.request.id for work in call.job.works],
        )

    def _refused(self, error: ApiError, request_id: str) -> Result:
        response = _Response(error.status, request_id, msgspec.Raw(error_body(error)))
        data = _encode(self._ground.batch_id, self._line, response, None)
        request_ids = [] if self._call is None else [work.request.id for work in self._call.job.works]
        return Result(self._line.number, "error", data, request_ids=request_ids)

    def _id(self, attempt: int) -> str:
        return f"{self._ground.batch_id}-{self._line.number}" + (f"-r{attempt}" if attempt else "")


def expired_result(batch_id: str, line: Line) -> Result:
    """The result of a line that had no answer when the batch's window closed."""
    return _failed(
        batch_id, line, "batch_expired", "This request could not be executed before the completion window expired."
    )


def _failed(batch_id: str, line: Line, code: str, message: str) -> Result:
    return Result(line.number, "error", _encode(batch_id, line, None, _LineError(code, message)))


def _encode(batch_id: str, line: Line, response: _Response | None, error: _LineError | None) -> bytes:
    name = f"batch_req_{batch_id.partition('-')[2]}-{line.number}"
    return _encoder.encode(_ResultLine(name, line.custom_id, response, error)) + b"\n"
