"""The part of a forward that depends on the rows' lengths: where positions are written, which keys they see.

Everything here is worked out once per forward for all layers with equally many places, and only if a layer asks. It
owns neither keys nor values. A layer with fewer places than a row has tokens is a ring: position p lies in place p
modulo the places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

RUN_TOKENS = 256
"""Neighbouring rows whose lengths round up to the same multiple attend together; each run has a price of its own."""


class RowSpan(NamedTuple):
    """Neighbouring rows that attend to equally many keys."""

    start: int
    stop: int
    attended: int


class View(NamedTuple):
    """The places of a layer that one forward writes and reads."""

    write: mx.array
    """Place of each position, (rows, 1, positions, 1) int32."""
    attended: int
    """Number of places that take part, counted from the first one."""
    held: mx.array
    """Position that each of them holds once the forward has written, (rows or 1, attended) int32; below 0: none."""
    runs: tuple[RowSpan, ...]
    """All rows, for attention that can leave out the places behind the rows' ends."""


class Forward:
    """One forward over the first rows of a batch.

    Args:
        offset: tokens each row has, (rows,) int32.
        positions: positions the forward feeds.
        longest: a host-side bound on `offset` plus `positions` over the rows not parked.
        bucket: places that hold `longest` tokens, rounded up so that few different shapes occur.
        parked: rows whose positions are written behind the places, (rows,) bool.
        lengths: the bound by row, where it is known; parked rows may have any.
        query_heads: heads that masks are laid out for; 1 keeps a mask shared between heads.
    """

    def __init__(
        self,
        offset: mx.array,
        positions: int,
        *,
        longest: int,
        bucket: int,
        parked: mx.array | None = None,
        lengths: Sequence[int] | None = None,
        query_heads: int = 1,
    ) -> None:
        self.offset = offset
        self._steps = mx.arange(positions, dtype=mx.int32)
        self._at = offset[:, None] + self._steps  # (rows, positions)
        self._longest = longest
        self._bucket = bucket
        self._parked = parked
        self._lengths = lengths or [longest] * self.rows
        self._query_heads = query_heads
        self._views: dict[int, View] = {}
        self._masks: dict[tuple[int, int | None], mx.array] = {}
        self._of_masks: dict[int, View] = {}
        self._cuts: dict[int, tuple[mx.array, list[tuple[RowSpan, mx.array]]]] = {}
        self._for_heads: dict[tuple[int, int], tuple[mx.array, mx.array]] = {}
        self._places: dict[tuple[int, ...], mx.array] = {}

    @property
    def rows(self) -> int:
        return int(self.offset.size)

    def view(self, places: int) -> View:
        """Return what layers with so many places write and read."""
        if places not in self._views:
            self._views[places] = self._new_view(places)
        return self._views[places]

    def mask(self, places: int, window: int | None = None) -> mx.array:
        """Return which of the attended places each position sees, (rows, 1 or query heads, positions, attended) bool.

        Args:
            window: positions that are seen, the own one included; None: all up to the own one.
        """
        if (places, window) not in self._masks:
            mask = self._laid_out(self._seen(self.view(places), window)[:, None], self._query_heads)
            self._masks[places, window] = mask
            self._of_masks[id(mask)] = self.view(places)
        return self._masks[places, window]

    def by_run(self, mask: mx.array, view: View) -> list[tuple[RowSpan, mx.array]]:
        """Cut a mask into runs, once for all layers that bring the same one.

        Args:
            mask: one that `mask` made, or another one over the places of `view`.
        """
        if id(mask) not in self._cuts:
            runs = self._of_masks.get(id(mask), view).runs
            cuts = [(run, mask[run.start : run.stop, :, :, : run.attended]) for run in runs]
            self._cuts[id(mask)] = mask, cuts  # the mask is held, so that no other gets its id
        return self._cuts[id(mask)][1]

    def for_heads(self, mask: mx.array, heads: int) -> mx.array:
        """Lay a mask out for a layer whose query heads are not those it was made for."""
        if mask.ndim != 4 or mask.shape[1] == heads:
            return mask
        if (id(mask), heads) not in self._for_heads:
            self._for_heads[id(mask), heads] = mask, self._laid_out(mask[:, :1], heads)
        return self._for_heads[id(mask), heads][1]

    def written(self, places: int, shape: tuple[int, ...]) -> mx.array:
        """Return where keys or values of a shape, (rows, heads, positions, size), are written."""
        key = (places, *shape)
        if key not in self._places:
            self._places[key] = mx.broadcast_to(self.view(places).write, shape)
        return self._places[key]

    def _new_view(self, places: int) -> View:
        attended, at = min(self._bucket, places), self._at
        held = mx.arange(attended, dtype=mx.int32)[None]
        if self._longest > places:
            last = at[:, -1:] + places  # never negative, whatever is taken off
            held = last - places - (last - held) % places
            at = at % places
        if self._parked is not None:
            at = mx.where(self._parked[:, None], places + self._steps, at)
        return View(at[:, None, :, None], attended, held, _runs(self._lengths, attended))

    def _seen(self, view: View, window: int | None) -> mx.array:
        """(rows, positions, attended) bool"""
        held, at = view.held[:, None], self._at[:, :, None]
        seen = held <= at
        if window is None:
            return seen
        seen = seen & (held > mx.maximum(at - window, -1))
        # A parked row may be long beyond all that is attended, and without any key it would give a NaN.
        return seen if self._parked is None else seen | self._parked[:, None, None]

    def _laid_out(self, mask: mx.array, heads: int) -> mx.array:
        if heads == 1:
            return mask
        return mx.contiguous(mx.broadcast_to(mask, (mask.shape[0], heads, *mask.shape[2:])))


def _runs(lengths: Sequence[int], attended: int) -> tuple[RowSpan, ...]:
    """Every row gets a bucket by its own length alone, so that no neighbour's length changes its sums."""
    runs: list[RowSpan] = []
    for row, length in enumerate(lengths):
        own = min(-(-max(length, 1) // RUN_TOKENS) * RUN_TOKENS, attended)
        if runs and runs[-1].attended == own:
            runs[-1] = runs[-1]._replace(stop=row + 1)
        else:
            runs.append(RowSpan(row, row + 1, own))
    return tuple(runs)
