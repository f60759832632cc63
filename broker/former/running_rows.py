"""Reads the rows that run: which worker has a suspect, how many rows of it are offline. Writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from redis.asyncio import Redis

from broker import keys
from broker.connection.connect import translated
from broker.former.capacity import WorkerState
from broker.former.preemption import BusyWorker, OfflineRow
from broker.registry import DaemonRecord
from broker.wire import Assignment

PROVEN_BY = 8
"""Tokens after which a row that nobody handed back is thought harmless; HAND_BACK has the same number."""


class RunningRow(NamedTuple):
    """What the former needs to know of a row that runs."""

    request_id: str
    is_offline: bool
    is_suspect: bool
    """Its last owner died, and it has not committed enough since to be cleared."""
    is_unproven: bool
    """It has not committed enough under this owner to be thought harmless."""


_CROWD_FIELDS = ("priority", "cost", "accepted_ms", "formed_ms", "suspect_below", "unproven_below")


class _CrowdState(NamedTuple):
    seat: Assignment
    priority: bytes | None
    cost: bytes | None
    accepted_ms: bytes | None
    formed_ms: bytes | None
    suspect_below: bytes | None
    unproven_below: bytes | None
    log_bytes: int

    @property
    def running(self) -> RunningRow:
        return RunningRow(
            self.seat.request_id,
            is_offline=self.priority == b"offline",
            is_suspect=self.committed < int(self.suspect_below or 0),
            is_unproven=self.committed < int(self.unproven_below or PROVEN_BY),
        )

    @property
    def committed(self) -> int:
        return self.log_bytes // 4

    def offline_on(self, worker_id: str) -> OfflineRow:
        return OfflineRow(
            worker_id,
            self.seat,
            cost=int(self.cost or 0),
            committed=self.committed,
            accepted_ms=int(self.accepted_ms or 0),
            formed_ms=int(self.formed_ms or 0),
        )


class RunningRows:
    """Reads rows through a command client."""

    def __init__(self, client: Redis) -> None:
        self._client = client

    async def blamed(self, seats: Sequence[Assignment]) -> frozenset[str]:
        """The request ids against which the death of their owner counts: if there are suspects, those alone."""
        rows = await self._read([seat.request_id for seat in seats])
        suspects = frozenset(row.request_id for row in rows if row.is_suspect)
        return suspects or frozenset(row.request_id for row in rows)

    async def views(self, workers: Sequence[DaemonRecord], *, with_rows: bool) -> list[WorkerState]:
        """Workers that take work as the policy sees them, full ones too; what runs on them only where asked for."""
        usable = [record for record in workers if record.is_accepting and not record.is_dead]
        running = await self._running(usable) if with_rows else [[] for _ in usable]
        return [view_of(record, rows) for record, rows in zip(usable, running, strict=True)]

    async def crowds(self, workers: Sequence[DaemonRecord]) -> list[BusyWorker]:
        """Workers that take work, full ones too, with the offline rows that run on them."""
        usable = [record for record in workers if record.is_accepting and not record.is_dead]
        with translated():
            pipe = self._client.pipeline(transaction=False)
            for record in usable:
                pipe.hgetall(keys.rows(record.id))
            found = await pipe.execute() if usable else []
            seats = [[Assignment(name.decode(), int(attempt)) for name, attempt in rows.items()] for rows in found]
            pipe = self._client.pipeline(transaction=False)
            for seat in (seat for of_worker in seats for seat in of_worker):
                pipe.hmget(keys.state(seat.request_id), *_CROWD_FIELDS)
                pipe.strlen(keys.log(seat.request_id))
            replies = iter(await pipe.execute() if any(seats) else [])
        states = [
            [_CrowdState._make([seat, *next(replies), next(replies)]) for seat in of_worker] for of_worker in seats
        ]
        return [_crowd(record, of_worker) for record, of_worker in zip(usable, states, strict=True)]

    async def _running(self, workers: Sequence[DaemonRecord]) -> list[list[RunningRow]]:
        with translated():
            pipe = self._client.pipeline(transaction=False)
            for record in workers:
                pipe.hkeys(keys.rows(record.id))
            ids_by_worker = [[raw.decode() for raw in ids] for ids in (await pipe.execute() if workers else [])]
        rows = iter(await self._read([request_id for ids in ids_by_worker for request_id in ids]))
        return [[next(rows) for _ in ids] for ids in ids_by_worker]

    async def _read(self, request_ids: Sequence[str]) -> list[RunningRow]:
        if not request_ids:
            return []
        with translated():
            pipe = self._client.pipeline(transaction=False)
            for request_id in request_ids:
                pipe.hmget(keys.state(request_id), "priority", "suspect_below", "unproven_below")
                pipe.strlen(keys.log(request_id))
            replies = await pipe.execute()
        rows = zip(request_ids, replies[::2], replies[1::2], strict=True)
        return [
            RunningRow(
                request_id,
                is_offline=priority == b"offline",
                is_suspect=log_bytes // 4 < int(suspect_below or 0),
                is_unproven=log_bytes // 4 < int(unproven_below or PROVEN_BY),
            )
            for request_id, (priority, suspect_below, unproven_below), log_bytes in rows
        ]


def _crowd(record: DaemonRecord, states: Sequence[_CrowdState]) -> BusyWorker:
    rows = [state.running for state in states]
    offline = [state.offline_on(record.id) for state, row in zip(states, rows, strict=True) if row.is_offline]
    return BusyWorker(view_of(record, rows), tuple(offline), record.held_rows)


def view_of(record: DaemonRecord, rows: Sequence[RunningRow] = ()) -> WorkerState:
    """A worker as the policy sees it."""
    assert record.lane is not None
    return WorkerState(
        id=record.id,
        lane=record.lane,
        free_rows=record.free_rows,
        free_tokens=record.free_tokens,
        offline_rows=sum(row.is_offline for row in rows),
        has_suspect=any(row.is_suspect for row in rows),
        unproven_rows=sum(row.is_unproven for row in rows),
    )
