"""Who has a place in the engine: interactive rows first, offline ones on what is left, paused if need be. Pure.

More rows may be here than the engine decodes: an interactive row that comes to a full engine takes the place of an
offline one, which keeps what it has and goes on, before anything new, as soon as a place is free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from workers.running_row import ActiveRow


@dataclass(frozen=True, slots=True)
class SchedulerRules:
    """Who may be made to give way, and what that may cost."""

    width: int = 0
    """Rows decoded together."""
    offline_age_s: float = 600.0
    """An offline row that waited longer, since it was accepted, does not give way."""
    min_run_s: float = 5.0
    """How long a row that gave way is left alone once it is back."""
    paused_tokens: int | None = None
    """Cache slots that paused rows may hold together beside a full engine; None: no bound."""

    def has_aged(self, row: ActiveRow, now_s: float) -> bool:
        return row.is_offline and row.age_s + now_s - row.seated_s >= self.offline_age_s

    def is_held(self, row: ActiveRow, now_s: float) -> bool:
        """Whether it is left alone because it gave way not long ago."""
        return row.is_offline and row.back_since_s is not None and now_s - row.back_since_s < self.min_run_s

    def may_give_way(self, row: ActiveRow, now_s: float) -> bool:
        return row.is_offline and not self.has_aged(row, now_s) and not self.is_held(row, now_s)


class Moves(NamedTuple):
    """What changes, in the order in which the engine must hear of it."""

    paused: list[ActiveRow]
    returned: list[ActiveRow]
    """Rows that give way and for which there is no memory: back into the line."""
    resumed: list[ActiveRow]
    admitted: list[ActiveRow]


def arrange(rows: Iterable[ActiveRow], rules: SchedulerRules, *, now_s: float) -> Moves:
    """Give out the engine's places."""
    running = [row for row in rows if row.is_running]
    decoding = [row for row in running if row.is_decoding]
    giving = sorted((row for row in decoding if rules.may_give_way(row, now_s)), key=lambda row: row.committed)
    wanting = sorted((row for row in running if not row.is_decoding), key=lambda row: _rank(row, rules, now_s))
    memory = _Memory(rules.paused_tokens, (row for row in running if row.is_paused))
    free = rules.width - len(decoding)
    moves = Moves([], [], [], [])
    for row in wanting:
        if free > 0:
            free -= 1
        elif giving and not row.is_offline:
            victim = giving.pop(0)
            (moves.paused if memory.takes(victim) else moves.returned).append(victim)
        else:
            continue
        (moves.resumed if row.is_paused else moves.admitted).append(row)
    return moves


def count_held(rows: Iterable[ActiveRow], rules: SchedulerRules, *, now_s: float) -> int:
    """Offline rows that have not aged and still do not give way."""
    held = (row for row in rows if row.is_running and rules.is_held(row, now_s))
    return sum(not rules.has_aged(row, now_s) for row in held)


class _Memory:
    """What paused rows may hold."""

    def __init__(self, tokens: int | None, paused: Iterable[ActiveRow]) -> None:
        self._left = None if tokens is None else tokens - sum(row.cached_tokens for row in paused)

    def takes(self, row: ActiveRow) -> bool:
        if self._left is None:
            return True
        if row.cached_tokens > self._left:
            return False
        self._left -= row.cached_tokens
        return True


def _rank(row: ActiveRow, rules: SchedulerRules, now_s: float) -> tuple[int, float]:
    """Paused rows by their age, oldest first; the others in the order in which they came."""
    if row.is_offline and row.is_paused:
        return (0 if rules.has_aged(row, now_s) else 2), row.seated_s - row.age_s
    return (3 if row.is_offline else 1), 0.0
