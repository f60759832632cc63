"""A call that waits its turn, however long that takes: for the queue, for a worker, for Redis to come back.

It is submitted under an id of the caller's choosing; whoever asks for the same call later, after a crash, finds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from api.calls.call import Endpoint, TextCall, Whole
from api.calls.client import DAY_S, QueueOptions, TextClient
from api.errors import ApiError, BusyError
from broker.errors import BrokerUnavailableError, ConflictError, QueueFullError
from broker.wire import Cause

AGAIN = frozenset({"lost", "diverged", "over_capacity", "no_worker", "shutdown"})
"""How a request may fail through no fault of its own; it is submitted anew then."""
ATTEMPTS = 5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


async def _at_once() -> None:
    return


@dataclass(frozen=True, slots=True)
class Patience:
    """What calls of one kind have in common."""

    key_id: str = ""
    keep_s: float = DAY_S
    """How long an answer waits in Redis for its reader, should that be away."""
    remaining_s: Callable[[], float] = lambda: DAY_S
    """Until the call is no use any more."""
    may_submit: Callable[[], Awaitable[None]] = _at_once
    """Returns once the caller is sure that it may."""
    on_wait: Callable[[str], None] = lambda what: None
    """Told what a call waits for, and the empty text once it does not."""


class AnsweredCall(NamedTuple):
    call: TextCall
    whole: Whole


class PatientCall:
    """One body, one answer."""

    def __init__(self, text: TextClient, patience: Patience, endpoint: Endpoint, body: bytes, *, call_id: str) -> None:
        self._text = text
        self._patience = patience
        self._endpoint = endpoint
        self._body = body
        self._first_id = call_id
        self._attempt = 0
        self._call: TextCall | None = None

    @property
    def call_id(self) -> str:
        """The id of its last attempt; each attempt has its own, the same every time it is asked for."""
        return self._first_id + (f"-r{self._attempt}" if self._attempt else "")

    @property
    def request_ids(self) -> Sequence[str]:
        """Its requests in the queue, none before it was accepted."""
        return () if self._call is None else [work.request.id for work in self._call.job.works]

    async def run(self) -> AnsweredCall:
        """Raises: ApiError when the body is refused, or the call failed for good."""
        while True:
            call = await self._submit()
            try:
                return AnsweredCall(call, await call.whole())
            except ApiError as error:
                if error.code not in AGAIN or self._attempt + 1 >= ATTEMPTS:
                    raise
                self._attempt += 1

    async def cancel(self, cause: Cause) -> None:
        """Have its requests end, if it has any."""
        if self._call is not None:
            await self._call.cancel(cause)
        else:  # it may be on its way into the queue
            await self._text.client.abandon(self.call_id, cause)

    async def _submit(self) -> TextCall:
        """Until the queue has taken it. Raises: ApiError."""
        pause_s = FIRST_PAUSE_S
        while True:
            await self._patience.may_submit()
            try:
                self._call = await self._accept()
            except (BusyError, QueueFullError, BrokerUnavailableError) as error:
                self._patience.on_wait(str(error))
            else:
                self._patience.on_wait("")
                return self._call
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    async def _accept(self) -> TextCall:
        terms = QueueOptions(
            call_id=self.call_id,
            deadline_s=max(1.0, self._patience.remaining_s()),
            keep_s=self._patience.keep_s,
            key_id=self._patience.key_id,
            is_noted=False,
        )
        try:
            return await self._text.submit(self._endpoint, self._body, terms)
        except ConflictError:
            # A template that says the date renders otherwise than it did when the call was submitted first.
            return await self._text.join(self._endpoint, self._body, terms)
