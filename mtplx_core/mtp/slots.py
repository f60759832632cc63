"""The host side of the batch: who sits in which slot, what each row has said so far, and what is still in flight.

Imports no MLX. Where cycles overlap, token values arrive one cycle late here, so everything that must be known when a
cycle is built is a bound: at least one token per cycle in flight, at most all of its positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mtplx_core.engine import Row, RowCycle, RowStats
from mtplx_core.mtp.depth import AcceptanceRates
from mtplx_core.mtp.prompt_lookup import TokenIndex


@dataclass(slots=True, eq=False)
class Slot:
    """A row in the batch."""

    row: Row
    tokens: list[int]
    """The completion so far, what earlier attempts committed included."""
    odds: AcceptanceRates = field(default_factory=AcceptanceRates)
    in_flight: list[int] = field(default_factory=list)
    """Positions of each cycle that was started and not collected."""
    has_left: bool = False
    """Ended or discarded; what is in flight for it is thrown away."""
    stats: RowStats = RowStats()
    _recall: TokenIndex | None = None
    _recalled: int = 0
    """Tokens of the completion that `_recall` has."""

    def recall(self) -> TokenIndex:
        """All tokens of the row; only true to it while nothing is in flight."""
        if self._recall is None:
            self._recall = TokenIndex()
            self._recall.extend(self.row.prompt)
        self._recall.extend(self.tokens[self._recalled :])
        self._recalled = len(self.tokens)
        return self._recall

    @property
    def is_finishing(self) -> bool:
        """Whether what is in flight will fill it for certain, so that another cycle would be wasted."""
        return self.has_left or len(self.tokens) + len(self.in_flight) >= self.row.max_tokens

    @property
    def longest(self) -> int:
        """The most tokens its slot may hold once all in flight is done."""
        return len(self.row.prompt) + len(self.tokens) - 1 + sum(self.in_flight)

    def count_cycle(self, cycle: RowCycle) -> RowCycle:
        self.stats = self.stats.after(cycle)
        return cycle


class Slots:
    """Slots in order; a hole is None."""

    def __init__(self) -> None:
        self._slots: list[Slot | None] = []

    def __iter__(self) -> Iterator[tuple[int, Slot]]:
        return ((slot, seat) for slot, seat in enumerate(self._slots) if seat is not None)

    @property
    def width(self) -> int:
        """Physical rows, holes included."""
        return len(self._slots)

    @property
    def taken(self) -> int:
        return sum(seat is not None for seat in self._slots)

    def find(self, row_id: str) -> Slot | None:
        return next((seat for _, seat in self if seat.row.row_id == row_id), None)

    def free_slot(self) -> int:
        """The first hole, or the slot behind the last."""
        return next((slot for slot, seat in enumerate(self._slots) if seat is None), len(self._slots))

    def put(self, slot: int, seat: Slot) -> None:
        if slot == len(self._slots):
            self._slots.append(None)
        self._slots[slot] = seat

    def remove(self, seat: Slot) -> None:
        seat.has_left = True
        self.vacate(seat)

    def vacate(self, seat: Slot) -> int:
        """Take a seat out that may come back; returns its slot."""
        slot = self._slots.index(seat)
        self._slots[slot] = None
        return slot

    def close_holes(self) -> list[tuple[int, int]]:
        """Move seats from the end into holes; returns the moves as (source, target) and drops the empty end."""
        moves = []
        while None in self._slots:
            last = self._slots.pop()
            if last is None:
                continue
            hole = self._slots.index(None)
            self._slots[hole] = last
            moves.append((len(self._slots), hole))
        return moves
