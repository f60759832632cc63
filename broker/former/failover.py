"""Takes over from the dead: hands their rows back and removes their records. Who is dead, `liveness` decides."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

from redis.asyncio import Redis

from broker import keys
from broker.connection.connect import translated
from broker.former.running_rows import RunningRows
from broker.heartbeats import Connection, read_beats
from broker.liveness import Watcher
from broker.registry import DaemonRecord
from broker.scripts import Scripts
from broker.wire import Assignment

logger = logging.getLogger(__name__)

ROUNDS = 100
"""A worker whose rows do not run out in so many is left for the next step."""


class Failover:
    """Watches every daemon, so that it knows who is dead when it is asked to act."""

    def __init__(
        self,
        client: Redis,
        scripts: Scripts,
        *,
        lease_s: float,
        max_crashes: int,
        monotonic: Callable[[], float],
    ) -> None:
        self._client = client
        self._monotonic = monotonic
        self._scripts = scripts
        self._rows = RunningRows(client)
        self._watcher = Watcher(lease_s)
        self._max_crashes = max_crashes
        self._dead: frozenset[str] = frozenset()

    async def watch(self, *, own_id: str) -> Connection:
        """Look at every heartbeat but our own; returns over which connection."""
        asked_s = self._monotonic()
        beats = await read_beats(self._client)
        others = {daemon_id: counter for daemon_id, counter in beats.counters.items() if daemon_id != own_id}
        self._dead = self._watcher.observe(
            others, asked_s=asked_s, answered_s=self._monotonic(), connection=beats.connection
        )
        return beats.connection

    def start_anew(self) -> None:
        """Redis was away: nobody is known to be dead."""
        self._dead = frozenset()
        self._watcher.start_anew()

    async def act(self, records: Sequence[DaemonRecord]) -> None:
        """Take over from everybody known to be dead."""
        # A record marked dead is one whose taker died over it; its owner is refused already.
        half_done = {record.id for record in records if record.is_dead}
        dead, self._dead = self._dead, frozenset()
        for daemon_id in sorted(dead | half_done):
            logger.warning("%s is dead", daemon_id, extra={"worker": daemon_id})
            await self._retire(daemon_id)

    async def _retire(self, daemon_id: str) -> None:
        await self._cancel_unheard(daemon_id)
        for _ in range(ROUNDS):
            seats = await self._scripts.retire(daemon_id)
            if not seats:
                return
            await self._hand_back(daemon_id, seats)

    async def _cancel_unheard(self, api_id: str) -> None:
        """End what only the dead one waited for; another kind of daemon has nothing of the sort."""
        with translated():
            raw_ids = await cast("Any", self._client.smembers(keys.listening(api_id)))
        for request_id in sorted(raw.decode() for raw in raw_ids):
            outcome = await self._scripts.cancel(request_id, "listener")
            extra = {"request_id": request_id, "api": api_id}
            logger.info("nobody hears request %s any more: %s", request_id, outcome, extra=extra)

    async def _hand_back(self, worker_id: str, seats: Sequence[Assignment]) -> None:
        blamed = await self._rows.blamed(seats)
        for is_crash in (True, False):
            part = [seat for seat in seats if (seat.request_id in blamed) == is_crash]
            if part:
                await self._hand_back_part(worker_id, part, is_crash=is_crash)

    async def _hand_back_part(self, worker_id: str, seats: Sequence[Assignment], *, is_crash: bool) -> None:
        outcomes = await self._scripts.hand_back(worker_id, seats, is_crash=is_crash, max_crashes=self._max_crashes)
        for request_id, outcome in outcomes.items():
            level = logging.ERROR if outcome == "dead" else logging.INFO
            extra = {"request_id": request_id, "worker": worker_id}
            logger.log(level, "request %s of dead %s: %s", request_id, worker_id, outcome, extra=extra)
