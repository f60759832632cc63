"""Calls under an Idempotency-Key: one request however often it is asked for, which outlives its listener.

While somebody listens the request is kept; a listener that leaves gives it `detach_s` to be asked for again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from api.errors import BadRequestError
from api.fleet.backend import RequestHandle
from api.openai.schemas import GenerationRequest
from broker.errors import BrokerUnavailableError
from broker.scripts import Accepted
from broker.wire import Cause, Event

logger = logging.getLogger(__name__)

HEADER = "idempotency-key"
LONGEST_KEY = 255
AGAIN_S = 1.0
UNSAID = frozenset(
    {
        *("stream", "stream_options", "user", "metadata", "safety_identifier", "service_tier", "verbosity", "priority"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    }
)
"""Fields that say how an answer is read or whose it is, not what is asked."""

_encoder = msgspec.json.Encoder(order="sorted")


class Keeper(Protocol):
    """What must be done to requests so that they outlive a listener, and end when nobody came."""

    async def keep(self, request_id: str, for_ms: int) -> None:
        """Raises: BrokerUnavailableError."""

    async def cancel_unwanted(self, request_id: str) -> None:
        """Raises: BrokerUnavailableError."""


def idempotency_key(header: str | None) -> str | None:
    """Raises: BadRequestError when it is no key."""
    if header is None:
        return None
    if not (header.strip() and header.isprintable() and len(header) <= LONGEST_KEY):
        message = f"Idempotency-Key is 1 to {LONGEST_KEY} printable characters."
        raise BadRequestError(message, param="Idempotency-Key")
    return header


def said_by(body: GenerationRequest) -> str:
    """Hash of what a call asks, as its client wrote it. What is made of that depends on the fleet and on the day."""
    fields = {name: getattr(body, name) for name in body.__struct_fields__ if name not in UNSAID}
    said = {name: value for name, value in fields.items() if value is not None}
    return hashlib.sha256(_encoder.encode([type(body).__name__, said])).hexdigest()


class Detached:
    """The requests of this process that outlive their listeners."""

    def __init__(self, keeper: Keeper, detach_s: float) -> None:
        self._keeper = keeper
        self._detach_s = detach_s
        self._waits: set[asyncio.Task[None]] = set()

    def hold(self, handle: RequestHandle) -> KeyedHandle:
        """The handle as answers read it."""
        return KeyedHandle(handle, self)

    async def keep_for_ever(self, request_id: str) -> None:
        """Until cancelled: somebody listens."""
        while True:
            with contextlib.suppress(BrokerUnavailableError):
                await self._keeper.keep(request_id, int(self._detach_s * 1000))
            await asyncio.sleep(self._detach_s / 3)

    def leave(self, request_id: str) -> None:
        """Nobody listens here any more; if nobody comes, it ends."""
        task = asyncio.create_task(self._end_later(request_id), name="detached-request")
        self._waits.add(task)
        task.add_done_callback(self._waits.discard)

    async def close(self) -> None:
        """This process ends; what is left runs to its own end."""
        for task in list(self._waits):
            task.cancel()
        await asyncio.gather(*self._waits, return_exceptions=True)

    async def _end_later(self, request_id: str) -> None:
        with contextlib.suppress(BrokerUnavailableError):
            await self._keeper.keep(request_id, int(self._detach_s * 1000))
        await asyncio.sleep(self._detach_s)
        while True:
            await asyncio.sleep(AGAIN_S / 10)  # the two clocks need not agree to the millisecond
            try:
                await self._keeper.cancel_unwanted(request_id)
            except BrokerUnavailableError as error:
                logger.debug("a detached request was not ended: %s", error)
                await asyncio.sleep(AGAIN_S)
            else:
                return


class KeyedHandle:
    """One request that outlives its listener."""

    def __init__(self, handle: RequestHandle, detached: Detached) -> None:
        self._handle = handle
        self._detached = detached

    @property
    def accepted(self) -> Accepted:
        return self._handle.accepted

    async def events(self) -> AsyncIterator[Event]:
        keeping = asyncio.create_task(self._detached.keep_for_ever(self.accepted.request_id), name="keep-request")
        try:
            async for event in self._handle.events():
                yield event
        finally:
            keeping.cancel()

    def leave(self) -> None:
        self._handle.leave()

    async def abandon(self, cause: Cause = "client") -> None:
        """Only a complete text ends it now; a listener that left may come again, here or at another process."""
        if cause == "stop":
            await self._handle.abandon(cause)
            return
        self._handle.leave()
        if cause != "shutdown":
            self._detached.leave(self.accepted.request_id)
