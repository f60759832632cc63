"""Ends what waits and will never run: requests past their deadline or too long for every worker, entries nobody reads.

A deadline is kept by the list of live requests, not by the waiting entries: an entry may be far behind the former's
window, or gone.
"""

from __future__ import annotations

import logging
from typing import Any, cast

from redis.asyncio import Redis

from broker import keys
from broker.connection.connect import translated
from broker.former.row_limits import RowLimits
from broker.former.waiting import WaitingEntry, WaitingQueue
from broker.scripts import Scripts
from broker.wire import Failed

logger = logging.getLogger(__name__)

SWEEP_MAX = 100
"""Live requests past their deadline that are looked at in one round."""


class Clearing:
    """One former's; works on its copy of the waiting streams and on the list of live requests."""

    def __init__(self, client: Redis, scripts: Scripts, line: WaitingQueue) -> None:
        self._client = client
        self._scripts = scripts
        self._line = line
        self.is_behind = False
        """Whether more has passed its deadline than one round looked at."""

    async def bury_unreadable(self) -> None:
        """Move what no version can read to the dead letters."""
        for entry in list(self._line.unreadable.values()):
            logger.error("entry %s of %s goes to the dead letters: %s", entry.key.entry_id, entry.key.stream, entry.why)
            await self._scripts.bury(entry.key.stream, entry.key.entry_id, entry.raw, why=entry.why)
            self._line.drop_unreadable(entry)

    async def expire(self) -> None:
        """End what has passed its deadline: live requests first, then entries that belong to none."""
        overdue = await self._overdue_ids()
        for request_id in overdue:
            await self._expire(request_id)
        for entry in self._line.overdue():
            if await self._expire(entry.request_id) != "cancelled":
                await self.look_into(entry)
        self.is_behind = len(overdue) == SWEEP_MAX

    async def reject_too_long(self, limits: RowLimits) -> None:
        """Fail what no worker of its model can ever run."""
        found = [(each, limit) for each in self._line.waiting if (limit := limits.limit_of(each)) is not None]
        for each, limit in found:
            message = f"The request may take {each.cost} tokens; the longest row of its model has {limit}."
            if await self._scripts.reject(each.ticket.id, Failed(each.ticket.id, "context_length_exceeded", message)):
                logger.info("a request is too long for every worker: %s", message, extra={"request_id": each.ticket.id})
            self._line.drop(self._line.find([each.ticket.id]))

    async def look_into(self, entry: WaitingEntry) -> bool:
        """See whether an entry still stands whose request no script found waiting; returns whether it was dropped."""
        stream, entry_id = entry.key
        with translated():
            pipe = self._client.pipeline(transaction=True)
            pipe.hmget(keys.state(entry.request_id), "status", "entry")
            pipe.xrange(stream, min=entry_id, max=entry_id)
            state, found = await pipe.execute()
        if found and state == [b"waiting", entry_id.encode()]:
            return False  # it waits; the worker had less room than it seemed
        if found:
            await self._scripts.bury(stream, entry_id, found[0][1], why="no request waits by this entry")
        self._line.drop([entry])
        return True

    async def _expire(self, request_id: str) -> str:
        outcome = await self._scripts.cancel(request_id, "deadline")
        if outcome == "cancelled":
            logger.info("request %s waited past its deadline", request_id, extra={"request_id": request_id})
            self._line.drop(self._line.find([request_id]))
        return outcome

    async def _overdue_ids(self) -> list[str]:
        with translated():
            raw_ids = await cast("Any", self._client).zrange(
                keys.LIVE, "-inf", self._line.now_ms, byscore=True, offset=0, num=SWEEP_MAX
            )
        return [raw.decode() for raw in raw_ids]
