"""One look at a running system through Redis: server, daemons, lanes, queues. Reads only; `status.py` shows it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from broker import keys
from broker.batches import NO_BATCH_WORKER, BatchDesk, BatchRecord
from broker.connection.connect import translated, without_password
from broker.connection.entrance import opened
from broker.registry import DaemonRecord, Load, Registry
from console.persistence import Persistence, judge_persistence

BATCH_WORKER = "batch-worker"


@dataclass(frozen=True, slots=True)
class ServerView:
    """The Redis in between."""

    url: str
    """Without its password."""
    version: str
    uptime_s: int
    used_memory_bytes: int
    eviction: str
    persistence: Persistence


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as its record says."""

    id: str
    host: str
    pid: str
    phase: str
    is_accepting: bool
    rows: int
    rows_active: int
    rows_free: int
    rows_paused: int
    tokens_committed: int
    """Since the worker started."""
    snapshot: Mapping[str, Any]
    """What its engine says of itself."""


@dataclass(frozen=True, slots=True)
class LaneView:
    """The workers of one fingerprint."""

    lane: str
    model: str
    mode: str
    profile: str
    rows: int
    rows_active: int
    max_context_tokens: int
    workers: Sequence[WorkerView]


@dataclass(frozen=True, slots=True)
class DaemonView:
    """A former, an API process or a batch worker."""

    id: str
    kind: str
    host: str
    pid: str


@dataclass(frozen=True, slots=True)
class QueueView:
    """What was accepted and has not ended, and what of it still waits."""

    waiting: Mapping[str, int]
    """Entries by stream: interactive, offline, returned."""
    requests: Mapping[str, int]
    tokens: Mapping[str, int]
    ended: Mapping[str, int]
    dead_letters: int


@dataclass(frozen=True, slots=True)
class BatchView:
    """One file of offline work."""

    id: str
    status: str
    total: int
    completed: int
    failed: int
    waits_for: str


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything there is to see at one moment."""

    server: ServerView
    lanes: Sequence[LaneView]
    daemons: Sequence[DaemonView]
    queue: QueueView
    batches: Sequence[BatchView] = ()
    """Those that have not ended."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


async def take_overview(url: str) -> Overview:
    """Raises: BrokerUnavailableError, BrokerConfigError."""
    async with opened(url) as client:
        registry, desk = Registry(client), BatchDesk(client)
        batch_workers = [
            DaemonView(each.name, BATCH_WORKER, each.host, each.pid) for each in await desk.batch_workers()
        ]
        records = [record for record in await registry.daemons() if not record.is_dead]
        return Overview(
            server=await _server(client, url),
            lanes=lanes_of(records),
            daemons=[*(_daemon(record) for record in records if record.lane is None), *batch_workers],
            queue=await _queue(client, await registry.load(), await registry.ended()),
            batches=[_batch(record, is_run=bool(batch_workers)) for record in await desk.open_batches()],
        )


def lanes_of(records: Sequence[DaemonRecord]) -> list[LaneView]:
    """Workers by lane fingerprint."""
    by_lane: dict[str, list[DaemonRecord]] = {}
    for record in records:
        if record.lane is not None:
            by_lane.setdefault(record.lane.fingerprint, []).append(record)
    return [_lane(fingerprint, members) for fingerprint, members in sorted(by_lane.items())]


def _lane(fingerprint: str, members: Sequence[DaemonRecord]) -> LaneView:
    lane = members[0].lane
    assert lane is not None
    workers = [_worker(record) for record in members]
    return LaneView(
        lane=fingerprint,
        model=lane.model,
        mode=lane.mode,
        profile=lane.profile,
        rows=sum(worker.rows for worker in workers),
        rows_active=sum(worker.rows_active for worker in workers),
        max_context_tokens=lane.max_context_tokens,
        workers=workers,
    )


def _worker(record: DaemonRecord) -> WorkerView:
    snapshot = _snapshot(record.fields.get("snapshot", ""))
    return WorkerView(
        id=record.id,
        host=record.fields.get("host", ""),
        pid=record.fields.get("pid", ""),
        phase=record.fields.get("phase", "unknown"),
        is_accepting=record.is_accepting,
        rows=record.lane.decode_batch_max if record.lane else 0,
        rows_active=record.active_rows,
        rows_free=max(record.free_rows, 0),
        rows_paused=record.paused_rows,
        tokens_committed=int(snapshot.get("tokens_committed", 0)),
        snapshot=snapshot,
    )


def _snapshot(text: str) -> Mapping[str, Any]:
    """A worker of another version may write what this one cannot read; then there is nothing to show."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _daemon(record: DaemonRecord) -> DaemonView:
    return DaemonView(record.id, record.kind, record.fields.get("host", ""), record.fields.get("pid", ""))


def _batch(record: BatchRecord, *, is_run: bool) -> BatchView:
    waits_for = record.waits_for if is_run else NO_BATCH_WORKER
    return BatchView(record.id, record.status, record.total, record.completed, record.failed, waits_for)


async def _server(client: Redis, url: str) -> ServerView:
    with translated():
        info = cast("Mapping[str, Any]", await client.info())
        config: Mapping[str, str] = {}
        # A managed Redis may not allow CONFIG; that is worth a word, not a failure.
        with contextlib.suppress(ResponseError):
            raw = cast("Mapping[bytes, bytes]", await client.config_get("appendonly", "appendfsync", "save"))
            config = {_text(name): _text(value) for name, value in raw.items()}
    return ServerView(
        url=without_password(url),
        version=str(info.get("valkey_version") or info.get("redis_version", "")),
        uptime_s=int(info.get("uptime_in_seconds", 0)),
        used_memory_bytes=int(info.get("used_memory", 0)),
        eviction=str(info.get("maxmemory_policy", "")),
        persistence=judge_persistence(config),
    )


async def _queue(client: Redis, load: Load, ended: Mapping[str, int]) -> QueueView:
    streams = {"interactive": keys.WAIT_INTERACTIVE, "offline": keys.WAIT_OFFLINE, "returned": keys.WAIT_RETURNED}
    with translated():
        waiting = {name: int(await client.xlen(key)) for name, key in streams.items()}
        dead_letters = int(await client.xlen(keys.DEAD_LETTERS))
    return QueueView(waiting, load.requests, load.tokens, ended, dead_letters)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
