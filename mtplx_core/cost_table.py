"""What a cycle costs by rows and depth: a table to start from, corrected by what cycles are seen to take.

Imports no MLX and reads no clock; times are given to it, in any unit as long as it is always the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

_WEIGHT = 0.1
"""Of a new sighting against what was known; the first ones weigh more."""
_OUTLIER = 2.0
"""Sightings beyond this multiple are pauses of the machine, not the price of a cycle."""
_EARLY_OUTLIER = 1.3
"""The same while few were seen: a depth that looks dear is not tried again for long."""


class CostTable:
    """Cost of one cycle over (rows, depth), interpolated over rows, or over positions where rows do not tell.

    Args:
        measured: costs by (rows, depth).
    """

    def __init__(self, measured: Mapping[tuple[int, int], float]) -> None:
        self._seed = dict(measured)
        self._seen: dict[tuple[int, int], float] = {}
        self._counts: Counter[tuple[int, int]] = Counter()
        self._starts: dict[tuple[int, int], float] = {}
        """What was interpolated from the seed."""

    def cost(self, rows: int, depth: int) -> float:
        """What a cycle is expected to take; unseen ones are scaled as the seen ones differ from the start table."""
        seen = self._seen.get((rows, depth))
        return seen if seen is not None else self._start(rows, depth) * self._scale(rows, depth)

    def see(self, rows: int, depth: int, cost: float) -> None:
        """Take a sighting into account."""
        key, known = (rows, depth), self.cost(rows, depth)
        self._counts[key] += 1
        if not self._seen:
            self._seen[key] = cost
            return
        weight = max(_WEIGHT, 1 / self._counts[key])
        most = _OUTLIER if weight == _WEIGHT else _EARLY_OUTLIER
        self._seen[key] = known + weight * (min(cost, most * known) - known)

    def entries(self) -> dict[tuple[int, int], float]:
        return {**self._seed, **self._seen}

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
        """How this machine now compares with the start table, by the nearest width and then depth that was seen."""
        if not self._seen:
            return 1.0
        key = min(self._seen, key=lambda key: (abs(key[0] - rows), abs(key[1] - depth), key))
        return self._seen[key] / self._start(*key)


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
    return CostTable({(1, 0): 0.05})
