"""Rows that an engine has and does not decode: those in prefill, those paused, and those about to come back.

Host bookkeeping; what the device has of a paused row is held here and nothing is done with it. Who is decoded, and
when, is the engine's business.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from mtplx_core.mtp.device_batch import LiftedRow
from mtplx_core.mtp.prefill import Prefill
from mtplx_core.mtp.slots import Slot


@dataclass(slots=True, eq=False)
class Paused:
    """A row out of the batch: still in prefill, or with a seat and what the device had of it."""

    prefill: Prefill | None = None
    seat: Slot | None = None
    lifted: LiftedRow | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether tokens of it were started on the device and not collected."""
        return self.seat is not None and bool(self.seat.in_flight)


class ParkedRows:
    """The rows beside the batch, by their ids."""

    def __init__(self) -> None:
        self.waiting: deque[Prefill] = deque()
        """In prefill, in the order in which they came, offline rows behind all others."""
        self.paused: dict[str, Paused] = {}
        self._returning: dict[str, Paused] = {}
        """Resumed, to be seated by the next step."""

    @property
    def places(self) -> int:
        """Rows here that take a place: all but the paused ones."""
        return len(self.waiting) + len(self._returning)

    @property
    def ids(self) -> list[str]:
        """Of the rows that take a place."""
        return [*(prefill.row.row_id for prefill in self.waiting), *self._returning]

    @property
    def under_way(self) -> int:
        """Paused rows of which tokens are still to come."""
        return sum(paused.is_under_way for paused in self.paused.values())

    @property
    def are_coming(self) -> bool:
        return bool(self.waiting or self._returning)

    @property
    def lifted_bytes(self) -> int:
        out = (*self.paused.values(), *self._returning.values())
        return sum(each.lifted.nbytes for each in out if each.lifted is not None)

    def line_up(self, prefill: Prefill) -> None:
        """Offline rows are fed behind all others."""
        is_offline = prefill.row.is_offline
        ahead = sum(is_offline or not other.row.is_offline for other in self.waiting)
        self.waiting.insert(ahead, prefill)

    def take_out(self, seat: Slot, lifted: LiftedRow) -> None:
        """Pause a row that was in the batch."""
        self.paused[seat.row.row_id] = Paused(seat=seat, lifted=lifted)

    def pause(self, row_id: str) -> None:
        """Pause a row that is here and takes a place, if there is one of this id."""
        if row_id in self._returning:
            self.paused[row_id] = self._returning.pop(row_id)
        for prefill in [prefill for prefill in self.waiting if prefill.row.row_id == row_id]:
            self.waiting.remove(prefill)
            self.paused[row_id] = Paused(prefill)

    def resume(self, row_id: str) -> None:
        paused = self.paused.pop(row_id)
        if paused.prefill is not None:
            self.line_up(paused.prefill)
        else:
            self._returning[row_id] = paused

    def discard(self, row_id: str) -> bool:
        """Forget a row; whether there was one of this id."""
        before = self.places + len(self.paused)
        for out in (self.paused.pop(row_id, None), self._returning.pop(row_id, None)):
            if out is not None and out.seat is not None:
                out.seat.has_left = True
        self.waiting = deque(prefill for prefill in self.waiting if prefill.row.row_id != row_id)
        return self.places + len(self.paused) < before

    def leave(self, row_id: str) -> bool:
        """A row with a seat has ended; whether it was here."""
        return (self.paused.pop(row_id, None) or self._returning.pop(row_id, None)) is not None

    def take_returning(self) -> list[tuple[Slot, LiftedRow]]:
        """The resumed rows, which are here no longer."""
        taken = list(self._returning.values())
        self._returning.clear()
        return [(back.seat, back.lifted) for back in taken if back.seat is not None and back.lifted is not None]

    def take_prefilled(self) -> list[Prefill]:
        """The rows whose prefill is done, which are here no longer."""
        done = [prefill for prefill in self.waiting if prefill.is_done]
        for prefill in done:
            self.waiting.remove(prefill)
        return done

    def clear(self) -> None:
        self.waiting.clear()
        self.paused.clear()
        self._returning.clear()
