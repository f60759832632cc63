"""Whether this process and its lanes can serve, in one word, with the picture that the word is drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from api.fleet.backend import Fleet
from api.fleet.catalog import Catalog, is_loading
from broker.errors import BrokerError
from broker.registry import DaemonRecord

Word = Literal["starting", "healthy", "draining", "stalled"]


class WorkerHealth(Struct, frozen=True):
    id: str
    phase: str
    accepting: bool
    rows: int
    rows_active: int
    rows_free: int
    rows_paused: int
    """Offline rows that gave way to interactive ones and wait where they are."""
    snapshot: Mapping[str, Any]
    """What the engine says of itself."""


class LaneHealth(Struct, frozen=True):
    """One lane: the workers with one fingerprint."""

    lane: str
    model: str
    profile: str
    mode: str
    decode_batch_max: int
    max_context_tokens: int
    depth: int
    workers: list[WorkerHealth]


class FormerHealth(Struct, frozen=True):
    id: str
    working: bool
    """The others stand by."""
    snapshot: Mapping[str, Any]


class Health(Struct, frozen=True):
    status: Word
    reason: str
    lanes: list[LaneHealth]
    formers: list[FormerHealth]
    queue: Mapping[str, int]
    """Requests accepted and not yet ended, by priority."""
    queue_tokens: Mapping[str, int]
    open_requests: int

    @property
    def http_status(self) -> int:
        return 200 if self.status == "healthy" else 503


async def take_health(catalog: Catalog, *, is_draining: bool, is_connected: bool, open_requests: int) -> Health:
    """The state of now; never fails, and shows the last picture while Redis is away."""
    reason = ""
    try:
        fleet = await catalog.fleet()
    except BrokerError as error:
        fleet, reason = catalog.last, str(error)
    if not reason and not is_connected:
        reason = "the reply subscription is down"
    word: Word = "stalled"
    if is_draining:
        word, reason = "draining", "this process is stopping"
    elif not reason:
        word, reason = judge(fleet, catalog.stalled)
    return Health(
        status=word,
        reason=reason,
        lanes=lanes(fleet),
        formers=formers(fleet),
        queue=fleet.load.requests,
        queue_tokens=fleet.load.tokens,
        open_requests=open_requests,
    )


def judge(fleet: Fleet, stalled: frozenset[str] = frozenset()) -> tuple[Word, str]:
    """The word for a fleet, and why. `stalled` names workers with active rows where nothing moves."""
    if not fleet.has_former:
        return "stalled", "no former has been heard of for a while: what waits is sent to no worker"
    workers = fleet.beating_workers
    if any(worker.is_accepting and worker.id not in stalled for worker in workers):
        return "healthy", ""
    if any(worker.id in stalled for worker in workers):
        return "stalled", "rows are active and nothing moves"
    if fleet.workers and not workers:
        return "stalled", "no worker has been heard of for a while"
    if not workers or any(is_loading(worker) for worker in workers):
        return "starting", "no worker is ready yet"
    return "draining", "no worker accepts new rows"


def lanes(fleet: Fleet) -> list[LaneHealth]:
    """The fleet's workers by lane, without those that have fallen silent."""
    by_lane: dict[str, list[DaemonRecord]] = {}
    for worker in fleet.beating_workers:
        assert worker.lane is not None
        by_lane.setdefault(worker.lane.fingerprint, []).append(worker)
    return [_lane(name, workers) for name, workers in sorted(by_lane.items())]


def formers(fleet: Fleet) -> list[FormerHealth]:
    """Who forms cohorts, and what it counts."""
    return [FormerHealth(each.id, each.fields.get("working") == "1", snapshot_of(each)) for each in fleet.formers]


def _lane(name: str, workers: list[DaemonRecord]) -> LaneHealth:
    lane = workers[0].lane
    assert lane is not None
    return LaneHealth(
        lane=name,
        model=lane.model,
        profile=lane.profile,
        mode=lane.mode,
        decode_batch_max=lane.decode_batch_max,
        max_context_tokens=lane.max_context_tokens,
        depth=lane.depth,
        workers=[_worker(worker) for worker in workers],
    )


def _worker(worker: DaemonRecord) -> WorkerHealth:
    return WorkerHealth(
        id=worker.id,
        phase=worker.fields.get("phase", "unknown"),
        accepting=worker.is_accepting,
        rows=worker.lane.decode_batch_max if worker.lane is not None else 0,
        rows_active=worker.active_rows,
        rows_free=max(worker.free_rows, 0),
        rows_paused=worker.paused_rows,
        snapshot=snapshot_of(worker),
    )


def snapshot_of(daemon: DaemonRecord) -> Mapping[str, Any]:
    """What a daemon counts itself; empty when it says nothing that can be read."""
    try:
        return msgspec.json.decode(daemon.fields.get("snapshot", "{}"), type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}
