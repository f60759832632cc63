"""One submitted request as its reader hears of it: every token once and in order, and one end, whatever is lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from broker.client.replies import Inbox
from broker.errors import BrokerUnavailableError
from broker.wire import TERMINAL, Cause, Event, Failed, Finished, Logprob, Tokens, unpack_tokens

if TYPE_CHECKING:
    from broker.client.client import Client
    from broker.scripts import Accepted, CancelOutcome

SILENCE_S = 5.0
"""A live request that hears nothing for so long reads its state."""
OVERDUE_S = 2.0
"""How long after its deadline a request that has not ended is ended from here; a former or a worker does so before."""
GIVE_UP_S = 15.0
"""How long after its deadline a reader waits for an end at all."""


class Progression(NamedTuple):
    """State and log of a request from some position on, read together."""

    status: str | None
    """None: Redis knows no such request."""
    end: Finished | Failed | None
    tokens: bytes
    logprobs: Sequence[Logprob]


class Handle:
    """One submitted request, for one reader."""

    def __init__(
        self,
        client: Client,
        accepted: Accepted,
        inbox: Inbox,
        *,
        silence_s: float,
        has_logprobs: bool,
        due_s: float | None = None,
    ) -> None:
        """`due_s` is the deadline by the event loop's clock, where it is known."""
        self.accepted = accepted
        """What ACCEPT answered."""
        self._client = client
        self._inbox = inbox
        self._silence_s = silence_s
        self._has_logprobs = has_logprobs
        self._due_s = due_s
        self._seen = bytearray()
        """Packed tokens handed to the reader so far."""

    async def events(self) -> AsyncIterator[Event]:
        """Tokens, progress, and exactly one `Finished` or `Failed` last.

        Survives lost messages, reconnects and a Redis that is away; ends with `Failed` when Redis no longer knows
        the request, or holds other tokens than were handed out, or is silent until long after the deadline.
        """
        while True:
            event = await self._inbox.get(self._patience_s)
            async for ready in self._settle(event):
                if isinstance(ready, Finished | Failed):
                    self._client.forget(self.request_id)
                    yield ready
                    return
                yield ready

    async def cancel(self, cause: Cause) -> CancelOutcome:
        return await self._client.cancel(self.request_id, cause)

    async def abandon(self, cause: Cause = "client") -> None:
        """The reader has left: cancel wherever the request is, and forget it."""
        await self._client.abandon(self.request_id, cause)

    def leave(self) -> None:
        """The reader has left, and the request goes on."""
        self._client.forget(self.request_id)

    @property
    def request_id(self) -> str:
        return self.accepted.request_id

    @property
    def _position(self) -> int:
        return len(self._seen) // 4

    @property
    def _patience_s(self) -> float:
        """How long to wait for an event before the state is read."""
        overdue_s = self._overdue_s
        if overdue_s >= OVERDUE_S:
            return min(self._silence_s, 1.0)
        return min(self._silence_s, OVERDUE_S - overdue_s)

    @property
    def _overdue_s(self) -> float:
        """For how long the deadline has passed, below 0 before it."""
        return float("-inf") if self._due_s is None else asyncio.get_running_loop().time() - self._due_s

    async def _settle(self, event: Event | None) -> AsyncIterator[Event]:
        """What one event, or the lack of one, means for the reader."""
        match event:
            case Tokens() if event.position <= self._position:
                if (fresh := self._take(event)) is not None:
                    yield fresh
            case Finished() if event.length in (-1, self._position) and event.length >= 0:
                yield event
            case None | Tokens() | Finished() | Failed():
                async for ready in self._repair():
                    yield ready
            case _:
                yield event

    def _take(self, event: Tokens) -> Tokens | Failed | None:
        """The part of an event that is new to the reader; None if there is none."""
        start = event.position * 4
        overlap = min(len(self._seen) - start, len(event.tokens))
        if self._seen[start : start + overlap] != event.tokens[:overlap]:
            message = "the request was run again after Redis lost its last moments, and went another way"
            return Failed(self.request_id, "diverged", message)
        fresh = event.tokens[overlap:]
        if not fresh:
            return None
        logprobs = None if event.logprobs is None else event.logprobs[overlap // 4 :]
        taken = Tokens(self.request_id, self._position, fresh, logprobs)
        self._seen += fresh
        return taken

    async def _repair(self) -> AsyncIterator[Event]:
        """Read state and log: hand out what was missed, and the end if there is one."""
        try:
            found = await self._client.read(self.request_id, self._position)
        except BrokerUnavailableError:
            if self._overdue_s >= GIVE_UP_S:
                yield self._given_up()
            return  # the subscription's return, or the next silence, brings us here again
        if found.status is None:
            yield Failed(self.request_id, "lost", "Redis no longer knows this request")
            return
        if found.tokens:
            logprobs = tuple(found.logprobs) if self._has_logprobs else None
            fresh = self._take(Tokens(self.request_id, self._position, found.tokens, logprobs))
            if fresh is not None:
                yield fresh
        if found.status in TERMINAL:
            yield found.end or Failed(self.request_id, "lost", "the request ended without a record of how")
        elif self._overdue_s >= GIVE_UP_S:
            yield self._given_up()
        elif self._overdue_s >= OVERDUE_S:
            await self._end_overdue()

    async def _end_overdue(self) -> None:
        """End it as the former would; one that runs is ended by its worker, or by the former once that is dead."""
        with contextlib.suppress(BrokerUnavailableError):
            await self._client.cancel(self.request_id, "deadline")
            self._inbox.demand_repair()

    def _given_up(self) -> Failed:
        return Failed(self.request_id, "deadline_exceeded", "the deadline has passed and nothing was heard since")


def tokens_of(event: Tokens) -> tuple[int, ...]:
    """The token ids an event carries."""
    return unpack_tokens(event.tokens)
