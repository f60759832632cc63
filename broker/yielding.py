"""Which offline rows give way to interactive work that found no row. Pure: no Redis, no clock of its own.

A row that gives way goes back into the line with the tokens it has, and on from there when a row is free again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from broker.rooms import Waiting, WorkerView
from broker.wire import Seat


@dataclass(frozen=True, slots=True)
class OfflineRow:
    """A row that runs offline work."""

    worker_id: str
    seat: Seat
    cost: int
    """Most cache slots it can ever take."""
    committed: int
    accepted_ms: int
    formed_ms: int


@dataclass(frozen=True, slots=True)
class YieldRules:
    """When a row need not give way."""

    now_ms: int
    offline_age_ms: int
    """It has waited its time."""
    min_run_ms: int
    """It gave way before, and has not run for so long since."""
    rows_per_key: int = 0

    def may_yield(self, row: OfflineRow) -> bool:
        has_aged = row.accepted_ms <= self.now_ms - self.offline_age_ms
        is_back = row.seat.attempt > 1 and row.formed_ms > self.now_ms - self.min_run_ms
        return not has_aged and not is_back


def give_way(
    unplaced: Iterable[Waiting],
    rows: Sequence[OfflineRow],
    workers: Sequence[WorkerView],
    *,
    rules: YieldRules,
    key_rows: Mapping[str, int],
) -> list[OfflineRow]:
    """The rows that give way, those with the fewest tokens first, one for each request that fits none that is free.

    Args:
        unplaced: interactive requests that have no row yet.
        workers: with the rows that are free now.
        key_rows: rows running now, by API key id.
    """
    views = {view.id: view for view in workers}
    free = {view.id: view.free_rows for view in workers}
    held = dict(key_rows)
    left = sorted((row for row in rows if rules.may_yield(row)), key=lambda row: row.committed)
    yielded: list[OfflineRow] = []
    for each in sorted(unplaced, key=lambda each: each.ordinal):
        key_id = each.ticket.key_id
        if each.is_suspect or (rules.rows_per_key and key_id and held.get(key_id, 0) >= rules.rows_per_key):
            continue
        if (host := next((view for view in workers if free[view.id] > 0 and _fits(each, view)), None)) is not None:
            free[host.id] -= 1
        elif (row := next((row for row in left if _fits(each, views.get(row.worker_id), row)), None)) is not None:
            left.remove(row)
            yielded.append(row)
        else:
            continue
        held[key_id] = held.get(key_id, 0) + 1
    return yielded


def _fits(each: Waiting, view: WorkerView | None, row: OfflineRow | None = None) -> bool:
    """Whether a request could run on a worker, in the place of a row if one is named."""
    if view is None or each.pool_key != (view.lane.model, view.lane.profile) or each.ticket.min_wire > view.lane.wire:
        return False
    slots = None if view.free_tokens is None else view.free_tokens + (row.cost if row is not None else 0)
    return each.cost <= view.lane.max_context_tokens and (slots is None or each.cost <= slots)
