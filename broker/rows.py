"""Reads the rows that run: which worker has a suspect, how many rows of it are offline. Writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from redis.asyncio import Redis

from broker import keys
from broker.connection import translated
from broker.registry import DaemonRecord
from broker.rooms import WorkerView
from broker.wire import Seat
from broker.yielding import OfflineRow


class RunningRow(NamedTuple):
    """What the former needs to know of a row that runs."""

    request_id: str
    is_offline: bool
    is_suspect: bool
    """Its last owner died, and it has not committed enough since to be cleared."""


class RunningRows:
    """Reads rows through a command client."""

    def __init__(self, client: Redis) -> None:
        self._client = client

    async def suspects(self, seats: Sequence[Seat]) -> frozenset[str]:
        """The request ids of those that are suspects."""
        rows = await self._read([seat.request_id for seat in seats])
        return frozenset(row.request_id for row in rows if row.is_suspect)

    async def views(self, workers: Sequence[DaemonRecord], *, with_rows: bool) -> list[WorkerView]:
        """Workers as the policy sees them, those alone that take work; what runs on them only where asked for."""
        usable = [record for record in workers if record.is_accepting and not record.is_dead and record.free_rows > 0]
        running = await self._running(usable) if with_rows else [[] for _ in usable]
        return [view_of(record, rows) for record, rows in zip(usable, running, strict=True)]

    async def offline(self, workers: Sequence[WorkerView]) -> list[OfflineRow]:
        """The offline rows that run on these workers."""
        with translated():
            pipe = self._client.pipeline(transaction=False)
            for view in workers:
                pipe.hgetall(keys.rows(view.id))
            found = await pipe.execute() if workers else []
            seats = [
                (view.id, Seat(request_id.decode(), int(attempt)))
                for view, rows in zip(workers, found, strict=True)
                for request_id, attempt in rows.items()
            ]
            pipe = self._client.pipeline(transaction=False)
            for _, seat in seats:
                pipe.hmget(keys.state(seat.request_id), "priority", "cost", "accepted_ms", "formed_ms")
                pipe.strlen(keys.log(seat.request_id))
            replies = await pipe.execute() if seats else []
        return [
            OfflineRow(worker_id, seat, int(cost), log_bytes // 4, int(accepted_ms), int(formed_ms or 0))
            for (worker_id, seat), (priority, cost, accepted_ms, formed_ms), log_bytes in zip(
                seats, replies[::2], replies[1::2], strict=True
            )
            if priority == b"offline"
        ]

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
                pipe.hmget(keys.state(request_id), "priority", "suspect_below")
                pipe.strlen(keys.log(request_id))
            replies = await pipe.execute()
        rows = zip(request_ids, replies[::2], replies[1::2], strict=True)
        return [
            RunningRow(request_id, priority == b"offline", log_bytes // 4 < int(suspect_below or 0))
            for request_id, (priority, suspect_below), log_bytes in rows
        ]


def view_of(record: DaemonRecord, rows: Sequence[RunningRow] = ()) -> WorkerView:
    """A worker as the policy sees it."""
    assert record.lane is not None
    return WorkerView(
        id=record.id,
        lane=record.lane,
        free_rows=record.free_rows,
        free_tokens=record.free_tokens,
        offline_rows=sum(row.is_offline for row in rows),
        has_suspect=any(row.is_suspect for row in rows),
    )
