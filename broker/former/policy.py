"""The forming policy: which waiting requests go to which worker now. Pure: no Redis, no clock of its own.

A free row stays empty only for the three stated reasons: nothing that waits fits it, the keys of what waits have
their rows, or it is held for company up to `batch_wait_ms`. (And nobody joins a suspect: a row is kept for one until
those beside it have proven themselves, so that whatever a suspect does next is its own doing.)
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter

from broker.former.capacity import Pool, Waiting, WorkerCapacity, WorkerState, open_room
from broker.former.fair_share import FairShare

_by_ordinal = attrgetter("ordinal")


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """The bounds within which rows are given out."""

    batch_wait_ms: int = 0
    """How long a free row may be held for company."""
    rows_per_key: int = 0
    """Most rows at once per API key; 0: no bound."""
    offline_age_ms: int = 600_000
    """Offline requests that waited longer go before interactive ones."""
    offline_share: float = 1.0
    """Share of a worker's rows up to which aged offline work goes before interactive work; what nobody else wants
    it takes in any case."""
    min_run_ms: int = 5000
    """How long an offline row that gave way to interactive work runs undisturbed once it is back."""


@dataclass(frozen=True, slots=True)
class Cohort:
    """Requests that go to one worker together."""

    worker_id: str
    waiting: tuple[Waiting, ...]

    @property
    def request_ids(self) -> list[str]:
        return [each.ticket.id for each in self.waiting]


@dataclass(frozen=True, slots=True)
class FormingPlan:
    cohorts: tuple[Cohort, ...] = ()
    wake_at_ms: int | None = None
    """When a cohort held for company must go at the latest."""


def plan(
    waiting: Iterable[Waiting],
    workers: Iterable[WorkerState],
    *,
    now_ms: int,
    config: PolicyConfig,
    shares: FairShare | None = None,
    key_rows: Mapping[str, int] | None = None,
) -> FormingPlan:
    """Match waiting requests with free rows.

    Args:
        shares: what each API key had so far; not changed.
        key_rows: rows running now, by API key id.
    """
    pools = _pools(workers, config)
    if not pools:
        return FormingPlan()
    round_ = _Round(pools, config, shares.copy() if shares else FairShare(), dict(key_rows or {}))
    lines = _lines(waiting, pools, aged_before_ms=now_ms - config.offline_age_ms)
    for rank in _Rank:
        round_.serve(lines[rank], is_capped=rank is _Rank.AGED)
        if rank is _Rank.INTERACTIVE:
            _let_aged_follow(lines, round_.placed)
    for pool in pools.values():
        pool.deal_by_length()
    return _release([room for pool in pools.values() for room in pool.rooms if room.taken], now_ms, config)


class _Rank(IntEnum):
    RETURNED = 0
    """Interactive requests whose stream stopped in the middle, and suspects: by ordinal alone."""
    AGED = 1
    """Offline requests that waited too long: before interactive ones up to their share, the rest after them."""
    INTERACTIVE = 2
    OFFLINE = 3


class _Round:
    """One round of giving out rows, rank by rank."""

    def __init__(
        self,
        pools: Mapping[tuple[str, str], Pool],
        config: PolicyConfig,
        shares: FairShare,
        key_rows: dict[str, int],
    ) -> None:
        self._pools = pools
        self._config = config
        self._shares = shares
        self._key_rows = key_rows
        self.placed: set[int] = set()
        """Ordinals of those that have a row."""
        self._free_rows = sum(room.free_rows for pool in pools.values() for room in pool.rooms)

    def serve(self, lines: Mapping[str, list[Waiting]], *, is_capped: bool) -> None:
        """Serve the lines in turn, always the one whose key had least; each line in the order of its ordinals."""
        turns: list[tuple[float, int, Iterator[Waiting]]] = []
        for line in lines.values():
            turns.append((self._start(line[0]), line[0].ordinal, iter(line)))
        heapq.heapify(turns)
        while turns and self._free_rows:
            _, _, line_left = turns[0]
            served = self._serve_next(line_left, is_capped=is_capped)
            if served is None:
                heapq.heappop(turns)
            else:
                heapq.heapreplace(turns, (self._start(served), served.ordinal, line_left))

    def _start(self, each: Waiting) -> float:
        # Rows that come back were paid for when they were formed first.
        is_first = each.is_suspect or (each.is_returned and not each.is_offline)
        return 0.0 if is_first else self._shares.start(each.ticket.key_id)

    def _serve_next(self, line: Iterator[Waiting], *, is_capped: bool) -> Waiting | None:
        for each in line:
            pool, key_id = self._pools.get(each.pool_key), each.ticket.key_id
            if pool is None or not self._has_row_left(key_id) or not pool.place(each, is_capped=is_capped):
                continue
            self.placed.add(each.ordinal)
            self._free_rows -= 1
            self._key_rows[key_id] = self._key_rows.get(key_id, 0) + 1
            if not each.is_returned:
                self._shares.charge(key_id, each.cost)
            return each
        return None

    def _has_row_left(self, key_id: str) -> bool:
        bound = self._config.rows_per_key
        return not bound or not key_id or self._key_rows.get(key_id, 0) < bound


def _pools(workers: Iterable[WorkerState], config: PolicyConfig) -> dict[tuple[str, str], Pool]:
    pools: dict[tuple[str, str], Pool] = {}
    for view in sorted((view for view in workers if view.free_rows > 0), key=attrgetter("id")):
        offline_rows = math.ceil(config.offline_share * view.lane.decode_batch_max)
        room = open_room(view, offline_left=offline_rows - view.offline_rows)
        pool = pools.setdefault((view.lane.model, view.lane.profile), Pool([], 0))
        pool.rooms.append(room)
        pool.largest = max(pool.largest, room.largest)
    return pools


def _lines(
    waiting: Iterable[Waiting], pools: Mapping[tuple[str, str], Pool], *, aged_before_ms: int
) -> dict[_Rank, dict[str, list[Waiting]]]:
    """Everybody by rank and API key, each line in the order of its ordinals."""
    by_key: defaultdict[tuple[bool, bool, str], list[Waiting]] = defaultdict(list)
    for each in waiting:
        by_key[each.line_key].append(each)
    _note_longest(by_key.values(), pools)
    lines: dict[_Rank, dict[str, list[Waiting]]] = {rank: {} for rank in _Rank}
    for (is_offline, is_returned, key_id), members in by_key.items():
        if not is_offline:
            rank, name = (_Rank.RETURNED, "") if is_returned else (_Rank.INTERACTIVE, key_id)
            lines[rank].setdefault(name, []).extend(members)
            continue
        for each in members:
            if each.is_suspect:
                lines[_Rank.RETURNED].setdefault("", []).append(each)
                continue
            rank = _Rank.AGED if each.accepted_ms <= aged_before_ms else _Rank.OFFLINE
            lines[rank].setdefault(key_id, []).append(each)
    for line in (line for by_name in lines.values() for line in by_name.values()):
        line.sort(key=_by_ordinal)
    return lines


def _note_longest(groups: Iterable[list[Waiting]], pools: Mapping[tuple[str, str], Pool]) -> None:
    uneven = {key: pool for key, pool in pools.items() if pool.has_different_contexts}
    if not uneven:
        return
    for each in (each for group in groups for each in group if each.pool_key in uneven):
        pool = uneven[each.pool_key]
        pool.longest = max(pool.longest, each.cost)


def _let_aged_follow(lines: Mapping[_Rank, dict[str, list[Waiting]]], placed: set[int]) -> None:
    """Aged requests that found their share taken are served after interactive ones, like all offline work."""
    for key_id, line in lines[_Rank.AGED].items():
        left = [each for each in line if each.ordinal not in placed]
        if left:
            lines[_Rank.OFFLINE][key_id] = left + lines[_Rank.OFFLINE].get(key_id, [])


def _release(rooms: Iterable[WorkerCapacity], now_ms: int, config: PolicyConfig) -> FormingPlan:
    """Let cohorts go, except those that have free rows beside them and may still wait for company."""
    cohorts: list[Cohort] = []
    wake_at_ms: int | None = None
    for room in rooms:
        oldest_ms = min(each.accepted_ms for each in room.taken)
        ready_ms = oldest_ms + config.batch_wait_ms
        if room.free_rows and now_ms < ready_ms and not any(each.is_returned for each in room.taken):
            wake_at_ms = ready_ms if wake_at_ms is None else min(wake_at_ms, ready_ms)
        else:
            cohorts.append(Cohort(room.view.id, tuple(room.taken)))
    return FormingPlan(tuple(cohorts), wake_at_ms)
