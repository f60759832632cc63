"""What a cycle costs by rows, depth and attended keys: a table to start from, corrected by what cycles take.

Imports no MLX and reads no clock; times are given to it, in any unit as long as it is always the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mtplx_core.mtp.key_cost import KeyCost

_WEIGHT = 0.1
"""Of a new sighting against what was known; the first ones weigh more."""
_OUTLIER = 2.0
"""Sightings beyond this multiple are pauses of the machine, not the price of a cycle."""
_EARLY_OUTLIER = 1.3
"""The same while few were seen: a depth that looks dear is not tried again for long."""
_MOOD = 0.03
"""Exponent with which a sighting moves all other costs: in part it tells of how fast the machine is now."""
_LEAST_SHARE = 0.25
"""A cycle over few keys costs at least this share of what its kind usually costs, however much keys seem to cost."""


class _Seen(NamedTuple):
    """The average of cycles of one kind."""

    cost: float
    keys: float
    """That all rows together attended to."""


class CostTable:
    """Cost of one cycle over (rows, depth), interpolated over rows, or over positions where rows do not tell.

    Sightings are averaged in logarithms: then what others are moved adds up to a share of what the seen cost itself
    has moved, and those not seen for a million cycles do not drift away. Each average is of cycles over so many keys;
    for a cycle over more or fewer the difference is added, so that costs that were learned beside long rows are right
    once those have left.

    Args:
        measured: costs by (rows, depth).
        has_mood: whether what one cost is seen to be tells of the others.
        row_keys: keys that each row attended to where they were measured.
        key_cost: what was measured of the cost of a key; None: nothing, it is learned.
    """

    def __init__(
        self,
        measured: Mapping[tuple[int, int], float],
        *,
        has_mood: bool = True,
        row_keys: int = 0,
        key_cost: KeyCost | None = None,
    ) -> None:
        self._seed = dict(measured)
        self._has_mood = has_mood
        self._row_keys = row_keys
        self._key_cost = key_cost or KeyCost()
        self._seen: dict[int, dict[int, _Seen]] = {}
        """By rows and then depth."""
        self._counts: Counter[tuple[int, int]] = Counter()
        self._starts: dict[tuple[int, int], float] = {}
        """What was interpolated from the seed."""

    def cost(self, rows: int, depth: int, keys: int | None = None) -> float:
        """What a cycle is expected to take.

        No cycle costs less than a shallower one. Where sightings, which are of different times, say so, both are half
        wrong.

        Args:
            keys: that all rows together attend to; None: as many as where costs were measured.
        """
        keys = self._keys(rows, keys)
        by_depth = {at: self._at(seen, at, keys) for at, seen in self._seen.get(rows, {}).items()}
        known = self.learned(rows, depth, keys)
        shallower = max((cost for at, cost in by_depth.items() if at < depth), default=0.0)
        if known < shallower:
            known = (known + shallower) / 2
        deeper = min((cost for at, cost in by_depth.items() if at > depth), default=known)
        return (known + deeper) / 2 if deeper < known else known

    def learned(self, rows: int, depth: int, keys: int | None = None) -> float:
        """What sightings of this cycle alone say; unseen, the start table scaled as the seen ones differ from it."""
        return self._at(self._usual(rows, depth), depth, self._keys(rows, keys))

    def see(self, rows: int, depth: int, cost: float, keys: int | None = None) -> None:
        """Take a sighting into account; one of nothing at all is none."""
        if cost <= 0:
            return
        keys = self._keys(rows, keys)
        usual, is_first_of_all = self._usual(rows, depth), not self._seen
        known = self._at(usual, depth, keys)
        self._counts[rows, depth] += 1
        count, by_depth = self._counts[rows, depth], self._seen.setdefault(rows, {})
        if is_first_of_all:
            by_depth[depth] = _Seen(cost, keys)
            return
        weight = max(_WEIGHT, 1 / count)
        cost = min(cost, (_OUTLIER if weight == _WEIGHT else _EARLY_OUTLIER) * known)
        if count > 1:
            self._key_cost.see(depth, keys=keys - usual.keys, cost=cost - usual.cost)
            if self._has_mood:
                self._change_mood((cost / known) ** _MOOD)
        between = usual.keys + weight * (keys - usual.keys)
        by_depth[depth] = _Seen(self._at(usual, depth, between) * (cost / known) ** weight, between)

    def measured_anew(self, measured: Mapping[tuple[int, int], float]) -> None:
        """Start from other costs where none was seen."""
        self._seed = dict(measured)
        self._starts.clear()

    def _keys(self, rows: int, keys: int | None) -> int:
        return rows * self._row_keys if keys is None else keys

    def _usual(self, rows: int, depth: int) -> _Seen:
        seen = self._seen.get(rows, {}).get(depth)
        if seen is not None:
            return seen
        return _Seen(self._start(rows, depth) * self._scale(rows, depth), self._keys(rows, None))

    def _at(self, usual: _Seen, depth: int, keys: float) -> float:
        """What a cycle that usually costs so much costs over so many keys."""
        moved = usual.cost + self._key_cost.of(depth) * (keys - usual.keys)
        return max(moved, _LEAST_SHARE * usual.cost)

    def _change_mood(self, factor: float) -> None:
        self._key_cost.scale(factor)
        for by_depth in self._seen.values():
            for depth, seen in by_depth.items():
                by_depth[depth] = seen._replace(cost=seen.cost * factor)

    def _start(self, rows: int, depth: int) -> float:
        if (rows, depth) not in self._starts:
            self._starts[rows, depth] = self._interpolated(rows, depth)
        return self._starts[rows, depth]

    def _interpolated(self, rows: int, depth: int) -> float:
        """From the widths measured at this depth, or else from how cost grows with positions over all depths."""
        known = sorted((width, cost) for (width, at), cost in self._seed.items() if at == depth)
        if known and known[0][0] <= rows <= known[-1][0]:
            return _along(known, rows)
        by_positions: dict[int, float] = {}
        for (width, at), cost in self._seed.items():
            positions = width * (at + 1)
            by_positions[positions] = min(cost, by_positions.get(positions, cost))
        return _along(sorted(by_positions.items()), rows * (depth + 1))

    def _scale(self, rows: int, depth: int) -> float:
        """Return how this machine compares with the start table, by the nearest depth that was seen, then width.

        Depth goes first. Where a deep cycle turns out dearer than the table says, shallow ones need not be: were they
        scaled with it, nothing would ever tell that they cost less.
        """
        seen = [(at, width) for width, by_depth in self._seen.items() for at in by_depth]
        if not seen:
            return 1.0
        at, width = min(seen, key=lambda one: (abs(one[0] - depth), abs(one[1] - rows), one))
        return self._at(self._seen[width][at], at, self._keys(width, None)) / self._start(width, at)


def _along(points: Sequence[tuple[int, float]], at: int) -> float:
    """Interpolated between the neighbours of `at`; beyond the last point it goes on as between the last two."""
    above = next((index for index, (place, _) in enumerate(points) if place >= at), len(points) - 1)
    if above == 0:
        return points[0][1]
    (low, low_cost), (high, high_cost) = points[above - 1], points[above]
    return low_cost + max(high_cost - low_cost, 0.0) * (at - low) / (high - low)


def assumed_costs(*, rows: int, depth: int) -> CostTable:
    """A table for a machine nobody has measured: every position past the first adds a twentieth of a plain step."""
    widths = sorted({1, rows})
    return CostTable({(w, d): 1.0 + 0.05 * (w * (d + 1) - 1) for w in widths for d in range(depth + 1)})


def assumed_draft_shares() -> CostTable:
    """What a draft of the head costs in plain steps, where nobody has measured it."""
    return CostTable({(1, 0): 0.05}, has_mood=False)
