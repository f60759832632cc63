"""A runner's hold on a batch: kept while Redis confirms it, and known to be gone before anybody else can have it.

Beats carry the progress to the batch's record and bring back its status and Redis' time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Literal

from broker.batches import BatchDesk, Beat
from broker.errors import BrokerUnavailableError

logger = logging.getLogger(__name__)

BEATS_PER_LEASE = 8
SURE_SHARE = 0.5
"""Part of the lease, counted from the last confirmation, during which nobody else can have the batch for certain."""

Halt = Literal["stopping", "lost", "cancelled", "expired"]
"""Why a runner stops before all lines are answered."""


class LeaseLostError(Exception):
    """The batch is not this runner's for certain, and will not be again while it runs."""


class BatchLease:
    """One runner, one batch. `halted` is set when the runner must stop, `why` says why."""

    def __init__(
        self,
        desk: BatchDesk,
        batch_id: str,
        runner: str,
        *,
        lease_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.halted = asyncio.Event()
        self.why: Halt | None = None
        self._desk = desk
        self._batch_id = batch_id
        self._lease_s = lease_s
        self._monotonic = monotonic
        self._confirmed_s = float("-inf")
        self._expires_in_s = float("inf")
        self._news = asyncio.Event()

    async def beat(self, fields: Mapping[str, str | int]) -> bool:
        """Say that this runner lives; whether the batch is its own. Raises: BrokerUnavailableError."""
        asked_s = self._monotonic()
        beat = await self._desk.beat(self._batch_id, self.runner, lease_ms=int(self._lease_s * 1000), fields=fields)
        if beat.status in ("lost", ""):
            return False
        self._confirmed_s = asked_s
        self._expires_in_s = beat.expires_s - beat.now_ms / 1000
        self._wake()
        self._judge(beat)
        return True

    async def beat_for_ever(self, fields: Callable[[], Mapping[str, str | int]]) -> None:
        """Beat until cancelled or until the batch is somebody else's; through trouble of every kind."""
        while True:
            await asyncio.sleep(self._lease_s / BEATS_PER_LEASE)
            try:
                if not await self.beat(fields()):
                    self.halt("lost")
                    return
            except BrokerUnavailableError as error:
                logger.debug("beat not sent: %s", error)
            except Exception:  # without beats nothing would ever be sure again
                logger.exception("a beat for batch %s failed", self._batch_id)

    async def be_sure(self) -> None:
        """Returns while the batch is this runner's for certain: at once, or after the next confirmation.

        Raises:
            LeaseLostError: it is not any more; or nobody can tell now, and this runner was told to stop.
        """
        while self.why == "lost" or not self._is_sure():
            if self.why in ("lost", "stopping"):
                raise LeaseLostError
            await self._news.wait()

    async def leave(self) -> None:
        """The next runner may have it at once."""
        try:
            await self._desk.leave(self._batch_id, self.runner)
        except BrokerUnavailableError as error:
            logger.debug("lease not given back: %s", error)

    def halt(self, why: Halt) -> None:
        """Have the runner stop; the first reason stays, but for a lost batch, which tops all."""
        if self.why is None or why == "lost":
            self.why = why
        self.halted.set()
        self._wake()

    def remaining_s(self) -> float:
        """Until the window closes, by Redis' clock."""
        return self._expires_in_s - (self._monotonic() - self._confirmed_s)

    def _wake(self) -> None:
        """Have whoever waits to be sure look again."""
        self._news.set()
        self._news = asyncio.Event()

    def _is_sure(self) -> bool:
        return self._monotonic() - self._confirmed_s < self._lease_s * SURE_SHARE

    def _judge(self, beat: Beat) -> None:
        if beat.status == "cancelling":
            self.halt("cancelled")
        elif beat.status == "in_progress" and beat.now_ms >= beat.expires_s * 1000:
            self.halt("expired")
