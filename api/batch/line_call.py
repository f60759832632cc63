"""One line of a batch on the queue, and its result as a line of the output or error file.

A runner that comes after a killed one submits the same lines again; what had been accepted is found, not run again.
"""

from __future__ import annotations

import msgspec

from api.batch.lines import BatchLine
from api.batch.parts import Result
from api.calls.call import Endpoint
from api.calls.client import TextClient
from api.calls.retrying import AnsweredCall, Patience, PatientCall
from api.errors import ApiError
from api.openai.formats import error_body
from api.text.json_text import encode_json
from broker.wire import Cause


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


class LineCall:
    """Runs one line to its result."""

    def __init__(
        self, text: TextClient, patience: Patience, endpoint: Endpoint, batch_id: str, line: BatchLine
    ) -> None:
        self._batch_id = batch_id
        self._line = line
        self._is_given_up = False
        """Whether the batch was cancelled, and its requests with it."""
        self.is_expired = False
        """Whether the batch's window closed before it was answered."""
        self._call = PatientCall(text, patience, endpoint, line.body, call_id=f"{batch_id}-{line.number}")

    async def run(self) -> Result:
        """The line's result, whatever becomes of it."""
        try:
            answered = await self._call.run()
        except ApiError as error:
            if error.code == "deadline_exceeded":
                return self._expired()
            response = _Response(error.status, self._call.call_id, msgspec.Raw(error_body(error)))
            return self._result(response)
        return self._answered(answered)

    async def cancel(self, cause: Cause) -> None:
        """Have its requests end with the batch, if it has any."""
        self._is_given_up = cause != "deadline"
        await self._call.cancel(cause)

    def _answered(self, answered: AnsweredCall) -> Result:
        call, whole = answered
        if "cancelled" in whole.reasons and self._is_given_up:
            return cancelled_result(self._batch_id, self._line)
        if "cancelled" in whole.reasons:
            return _failed(self._batch_id, self._line, "request_cancelled", "The request was cancelled.")
        if "deadline" in whole.reasons:
            return self._expired()
        result = self._result(_Response(200, call.id, msgspec.Raw(whole.body)))
        return result._replace(
            kind="output",
            input_tokens=whole.usage.prompt_tokens,
            output_tokens=whole.usage.completion_tokens,
        )

    def _expired(self) -> Result:
        self.is_expired = True
        return expired_result(self._batch_id, self._line)

    def _result(self, response: _Response) -> Result:
        data = _encode(self._batch_id, self._line, response, None)
        return Result(self._line.number, "error", data, request_ids=self._call.request_ids)


def expired_result(batch_id: str, line: BatchLine) -> Result:
    """The result of a line that had no answer when the batch's window closed."""
    return _failed(
        batch_id, line, "batch_expired", "This request could not be executed before the completion window expired."
    )


def cancelled_result(batch_id: str, line: BatchLine) -> Result:
    """The result of a line that had no answer when the batch was cancelled."""
    return _failed(
        batch_id, line, "batch_cancelled", "This request was not executed, because the batch was cancelled before."
    )


def _failed(batch_id: str, line: BatchLine, code: str, message: str) -> Result:
    return Result(line.number, "error", _encode(batch_id, line, None, _LineError(code, message)))


def _encode(batch_id: str, line: BatchLine, response: _Response | None, error: _LineError | None) -> bytes:
    name = f"batch_req_{batch_id.partition('-')[2]}-{line.number}"
    return encode_json(_ResultLine(name, line.custom_id, response, error)) + b"\n"
