"""The forming policy: which waiting requests go to which worker now. Pure: no Redis, no clock of its own.

A free row stays empty only for the three stated reasons: nothing that waits fits it, the keys of what waits have
their rows, or it is held for company up to `batch_wait_ms`. (And a suspect never joins another suspect.)
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from operator import attrgetter

from broker.shares import Shares
from broker.wire import Lane, Ticket

_by_ordinal = attrgetter("ordinal")
_by_cost = attrgetter("ticket.cost_tokens", "ordinal")


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


@dataclass(frozen=True, slots=True)
class Waiting:
    """One waiting request."""

    ticket: Ticket
    ordinal: int
    """Its place in line, given once by ACCEPT and kept over hand-backs."""
    accepted_ms: int
    crashes: int = 0
    committed: int = 0
    is_returned: bool = False

    @property
    def is_offline(self) -> bool:
        return self.ticket.priority == "offline"

    @property
    def is_suspect(self) -> bool:
        """An owner died with it; a worker runs one such request at a time."""
        return self.crashes > 0


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What the policy knows of an accepting worker."""

    id: str
    lane: Lane
    free_rows: int
    free_tokens: int | None = None
    offline_rows: int = 0
    has_suspect: bool = False


@dataclass(frozen=True, slots=True)
class Cohort:
    """Requests that go to one worker together."""

    worker_id: str
    waiting: tuple[Waiting, ...]

    @property
    def request_ids(self) -> list[str]:
        return [each.ticket.id for each in self.waiting]


@dataclass(frozen=True, slots=True)
class Plan:
    cohorts: tuple[Cohort, ...] = ()
    wake_at_ms: int | None = None
    """When a cohort held for company must go at the latest."""


def plan(
    waiting: Iterable[Waiting],
    workers: Iterable[WorkerView],
    *,
    now_ms: int,
    config: PolicyConfig,
    shares: Shares | None = None,
    key_rows: Mapping[str, int] | None = None,
) -> Plan:
    """Match waiting requests with free rows.

    Args:
        shares: what each API key had so far; not changed.
        key_rows: rows running now, by API key id.
    """
    pools = _pools(workers, config)
    if not pools:
        return Plan()
    round_ = _Round(pools, config, shares.copy() if shares else Shares(), dict(key_rows or {}))
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
    """Interactive requests whose stream stopped in the middle: by ordinal alone."""
    AGED = 1
    """Offline requests that waited too long: before interactive ones up to their share, the rest after them."""
    INTERACTIVE = 2
    OFFLINE = 3


def _rank(each: Waiting, aged_before_ms: int) -> _Rank:
    if not each.is_offline:
        return _Rank.RETURNED if each.is_returned else _Rank.INTERACTIVE
    return _Rank.AGED if each.accepted_ms <= aged_before_ms else _Rank.OFFLINE


@dataclass(slots=True)
class _Room:
    """The room that is left on one worker."""

    view: WorkerView
    free_rows: int
    free_tokens: int
    offline_left: int
    has_suspect: bool
    taken: list[Waiting] = field(default_factory=list)

    @property
    def largest(self) -> int:
        """Most tokens that one more request may cost."""
        return min(self.view.lane.max_context_tokens, self.free_tokens) if self.free_rows else 0

    @property
    def fullness(self) -> float:
        return 1.0 - self.free_rows / max(self.view.lane.decode_batch_max, 1)

    def takes(self, each: Waiting, *, is_capped: bool = False) -> bool:
        if is_capped and self.offline_left <= 0:
            return False
        if each.ticket.cost_tokens > self.largest or each.ticket.min_wire > self.view.lane.wire:
            return False
        return not (each.is_suspect and self.has_suspect)

    def take(self, each: Waiting) -> None:
        self.taken.append(each)
        self.free_rows -= 1
        self.free_tokens -= each.ticket.cost_tokens
        self.offline_left -= each.is_offline
        self.has_suspect |= each.is_suspect


@dataclass(slots=True)
class _Pool:
    """The workers with free rows of one model and profile."""

    rooms: list[_Room]
    largest: int
    longest: int = 0
    """Cost of the longest request that waits for this pool."""
    has_refused: bool = False

    def find(self, each: Waiting, *, is_capped: bool) -> _Room | None:
        """The emptiest worker that takes it; while longer ones wait, the one with the least context goes first."""
        if each.ticket.cost_tokens > self.largest:
            return None
        fitting = [room for room in self.rooms if room.free_rows and room.takes(each, is_capped=is_capped)]
        if len(fitting) < 2:
            return fitting[0] if fitting else None
        contexts = [room.view.lane.max_context_tokens for room in fitting]
        must_spare = self.longest > min(contexts)
        return min(fitting, key=lambda room: (must_spare and room.view.lane.max_context_tokens, room.fullness))

    def place(self, each: Waiting, *, is_capped: bool) -> bool:
        room = self.find(each, is_capped=is_capped)
        if room is None:
            self.has_refused = True
            return False
        room.take(each)
        self.largest = max(room.largest for room in self.rooms)
        return True

    def deal_by_length(self) -> None:
        """Give like lengths to the same worker, each worker keeping its number of rows.

        Left alone when a row is empty though something was refused: dealing anew might have made room for it.
        """
        filled = [room for room in self.rooms if room.taken]
        has_idle = any(room.free_rows for room in self.rooms)
        if len(filled) < 2 or (self.has_refused and has_idle):
            return
        filled.sort(key=lambda room: room.view.lane.max_context_tokens)
        everything = iter(sorted((each for room in filled for each in room.taken), key=_by_cost))
        hands = [[next(everything) for _ in room.taken] for room in filled]
        fresh = [_deal(room, hand) for room, hand in zip(filled, hands, strict=True)]
        dealt = [room for room in fresh if room is not None]
        if len(dealt) == len(filled):
            self.rooms = [room for room in self.rooms if not room.taken] + dealt


def _deal(room: _Room, hand: Sequence[Waiting]) -> _Room | None:
    """The same room with another hand; None when it does not take it."""
    fresh = _room(room.view, offline_left=0)
    for each in hand:
        if not fresh.takes(each):
            return None
        fresh.take(each)
    return fresh


class _Round:
    """One round of giving out rows, rank by rank."""

    def __init__(
        self,
        pools: Mapping[tuple[str, str], _Pool],
        config: PolicyConfig,
        shares: Shares,
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
            line.sort(key=_by_ordinal)
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
        return 0.0 if each.is_returned and not each.is_offline else self._shares.start(each.ticket.key_id)

    def _serve_next(self, line: Iterator[Waiting], *, is_capped: bool) -> Waiting | None:
        for each in line:
            ticket = each.ticket
            if not self._has_row_left(ticket.key_id):
                continue
            if not self._pools[ticket.model, ticket.profile].place(each, is_capped=is_capped):
                continue
            self.placed.add(each.ordinal)
            self._free_rows -= 1
            self._key_rows[ticket.key_id] = self._key_rows.get(ticket.key_id, 0) + 1
            if not each.is_returned:
                self._shares.charge(ticket.key_id, ticket.cost_tokens)
            return each
        return None

    def _has_row_left(self, key_id: str) -> bool:
        bound = self._config.rows_per_key
        return not bound or not key_id or self._key_rows.get(key_id, 0) < bound


def _room(view: WorkerView, *, offline_left: int) -> _Room:
    free_tokens = view.lane.max_context_tokens * view.free_rows if view.free_tokens is None else view.free_tokens
    return _Room(view, view.free_rows, free_tokens, offline_left, view.has_suspect)


def _pools(workers: Iterable[WorkerView], config: PolicyConfig) -> dict[tuple[str, str], _Pool]:
    pools: dict[tuple[str, str], _Pool] = {}
    for view in sorted((view for view in workers if view.free_rows > 0), key=attrgetter("id")):
        offline_rows = math.ceil(config.offline_share * view.lane.decode_batch_max)
        room = _room(view, offline_left=offline_rows - view.offline_rows)
        pool = pools.setdefault((view.lane.model, view.lane.profile), _Pool([], 0))
        pool.rooms.append(room)
        pool.largest = max(pool.largest, room.largest)
    return pools


def _lines(
    waiting: Iterable[Waiting], pools: Mapping[tuple[str, str], _Pool], *, aged_before_ms: int
) -> dict[_Rank, dict[str, list[Waiting]]]:
    """Those whose model has a free row, by rank and API key."""
    lines: dict[_Rank, dict[str, list[Waiting]]] = {rank: {} for rank in _Rank}
    for each in waiting:
        ticket = each.ticket
        pool = pools.get((ticket.model, ticket.profile))
        if pool is None:
            continue
        pool.longest = max(pool.longest, ticket.prompt_tokens + ticket.max_tokens)
        rank = _rank(each, aged_before_ms)
        key_id = "" if rank is _Rank.RETURNED else ticket.key_id
        lines[rank].setdefault(key_id, []).append(each)
    return lines


def _let_aged_follow(lines: Mapping[_Rank, dict[str, list[Waiting]]], placed: set[int]) -> None:
    """Aged requests that found their share taken are served after interactive ones, like all offline work."""
    for key_id, line in lines[_Rank.AGED].items():
        left = [each for each in line if each.ordinal not in placed]
        if left:
            lines[_Rank.OFFLINE].setdefault(key_id, []).extend(left)


def _release(rooms: Iterable[_Room], now_ms: int, config: PolicyConfig) -> Plan:
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
    return Plan(tuple(cohorts), wake_at_ms)
