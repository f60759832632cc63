"""What offline rows leave to interactive work that found no row: places, or memory. Pure: no Redis, no clock.

A worker pauses an offline row for an interactive one by itself; what is decided here is how many it can. Where memory
is short a row is handed back instead: it returns to the line with the tokens it has, and goes on from there later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from broker.former.capacity import Waiting, WorkerState
from broker.wire import Assignment


@dataclass(frozen=True, slots=True)
class OfflineRow:
    """A row that runs offline work, or is paused."""

    worker_id: str
    seat: Assignment
    cost: int
    """Most cache slots it can ever take."""
    committed: int
    accepted_ms: int
    formed_ms: int


@dataclass(frozen=True, slots=True)
class BusyWorker:
    """A worker, full or not, and the offline rows on it."""

    view: WorkerState
    offline: tuple[OfflineRow, ...] = ()
    held: int | None = None
    """Rows it leaves alone because they gave way not long ago; None: it cannot pause rows."""


@dataclass(frozen=True, slots=True)
class PreemptionRules:
    """When a row need not give way."""

    now_ms: int
    offline_age_ms: int
    """It has waited its time."""
    min_run_ms: int
    """It gave way before, and has not run for so long since."""
    rows_per_key: int = 0

    def has_aged(self, row: OfflineRow) -> bool:
        return row.accepted_ms <= self.now_ms - self.offline_age_ms

    def may_yield(self, row: OfflineRow) -> bool:
        is_back = row.seat.attempt > 1 and row.formed_ms > self.now_ms - self.min_run_ms
        return not self.has_aged(row) and not is_back


def places_of(crowd: BusyWorker, rules: PreemptionRules) -> WorkerState:
    """The worker as interactive work sees it: rows that can be paused are as good as free. FORM counts the same way."""
    if crowd.held is None:
        return crowd.view
    giving = sum(not rules.has_aged(row) for row in crowd.offline) - crowd.held
    return replace(crowd.view, free_rows=crowd.view.free_rows + max(giving, 0))


def give_way(
    unplaced: Iterable[Waiting], crowds: Sequence[BusyWorker], *, rules: PreemptionRules, key_rows: Mapping[str, int]
) -> list[OfflineRow]:
    """The rows that are handed back, those with the fewest tokens first, so that a request fits that does not now.

    Args:
        unplaced: interactive requests that have no row yet.
        crowds: the workers, with what is free on them now.
        key_rows: rows running now, by API key id.
    """
    rooms = [_Room(crowd, rules) for crowd in crowds]
    held = dict(key_rows)
    yielded: list[OfflineRow] = []
    for each in sorted(unplaced, key=lambda each: each.ordinal):
        key_id = each.ticket.key_id
        if each.is_suspect or (rules.rows_per_key and key_id and held.get(key_id, 0) >= rules.rows_per_key):
            continue
        offers = [(rows, room) for room in rooms if (rows := room.make_room(each)) is not None]
        if not offers:
            continue
        rows, room = min(offers, key=lambda offer: (len(offer[0]), [row.committed for row in offer[0]]))
        room.take(each, rows)
        yielded += rows
        held[key_id] = held.get(key_id, 0) + 1
    return yielded


class _Room:
    """What is left on one worker."""

    def __init__(self, crowd: BusyWorker, rules: PreemptionRules) -> None:
        self._view = crowd.view
        self._free_rows = places_of(crowd, rules).free_rows
        self._free_tokens = crowd.view.free_tokens
        self._can_pause = crowd.held is not None
        giving = (row for row in crowd.offline if rules.may_yield(row))
        self._left = sorted(giving, key=lambda row: row.committed)

    def make_room(self, each: Waiting) -> list[OfflineRow] | None:
        """The rows without which it would fit here, none if it does already; None when it cannot."""
        lane, ticket = self._view.lane, each.ticket
        is_served = each.pool_key == (lane.model, lane.profile) and ticket.min_wire <= lane.wire
        if not is_served or each.cost > lane.max_context_tokens:
            return None
        given: list[OfflineRow] = []
        for row in self._left:
            if self._is_enough(each, given):
                break
            given.append(row)
        return given if self._is_enough(each, given) else None

    def take(self, each: Waiting, given: Sequence[OfflineRow]) -> None:
        self._free_rows += self._rows_of(given) - 1
        if self._free_tokens is not None:
            self._free_tokens += sum(row.cost for row in given) - each.cost
        self._left = [row for row in self._left if row not in given]

    def _is_enough(self, each: Waiting, given: Sequence[OfflineRow]) -> bool:
        has_memory = self._free_tokens is None or each.cost <= self._free_tokens + sum(row.cost for row in given)
        return has_memory and self._free_rows + self._rows_of(given) > 0

    def _rows_of(self, given: Sequence[OfflineRow]) -> int:
        """Places that they leave: a place that a paused row could have given is counted as free already."""
        return 0 if self._can_pause else len(given)
