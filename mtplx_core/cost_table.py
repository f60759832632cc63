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
_MOOD = 0.03
"""Exponent with which a sighting moves all other costs: in part it tells of how fast the machine is now."""


class CostTable:
    """Cost of one cycle over (rows, depth), interpolated over rows, or over positions where rows do not tell.

    Sightings are averaged in logarithms: then what others are moved adds up to a share of what the seen cost itself
    has moved, and those not seen for a million cycles do not drift away.

    Args:
        measured: costs by (rows, depth).
        has_mood: whether what one cost is seen to be tells of the others.
    """

    def __init__(self, measured: Mapping[tuple[int, int], float], *, has_mood: bool = True) -> None:
        self._seed = dict(measured)
        self._has_mood = has_mood
        self._seen: dict[int, dict[int, float]] = {}
        """By rows and then depth."""
        self._counts: Counter[tuple[int, int]] = Counter()
        self._starts: dict[tuple[int, int], float] = {}
        """What was interpolated from the seed."""

    def cost(self, rows: int, depth: int) -> float:
        """What a cycle is expected to take.

        No cycle costs less than a shallower one. Where sightings, which are of different times, say so, both are half
        wrong.
        """
        by_depth, known = self._seen.get(rows, {}), self.learned(rows, depth)
        shallower = max((cost for at, cost in by_depth.items() if at < depth), default=0.0)
        if known < shallower:
            known = (known + shallower) / 2
        deeper = min((cost for at, cost in by_depth.items() if at > depth), default=known)
        return (known + deeper) / 2 if deeper < known else known

    def learned(self, rows: int, depth: int) -> float:
        """What sightings of this cycle alone say; unseen, the start table scaled as the seen ones differ from it."""
        known = self._seen.get(rows, {}).get(depth)
        return self._start(rows, depth) * self._scale(rows, depth) if known is None else known

    def see(self, rows: int, depth: int, cost: float) -> None:
        """Take a sighting into account; one of nothing at all is none."""
        if cost <= 0:
            return
        known, is_first_of_all = self.learned(rows, depth), not self._seen
        self._counts[rows, depth] += 1
        count, by_depth = self._counts[rows, depth], self._seen.setdefault(rows, {})
        if is_first_of_all:
            by_depth[depth] = cost
            return
        weight = max(_WEIGHT, 1 / count)
        cost = min(cost, (_OUTLIER if weight == _WEIGHT else _EARLY_OUTLIER) * known)
        if count > 1 and self._has_mood:
            self._change_mood((cost / known) ** _MOOD)
        by_depth[depth] = known * (cost / known) ** weight

    def _change_mood(self, factor: float) -> None:
        for by_depth in self._seen.values():
            for depth in by_depth:
                by_depth[depth] *= factor

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
        width = min(self._seen, key=lambda width: (abs(width - rows), width))
        at = min(self._seen[width], key=lambda at: (abs(at - depth), at))
        return self._seen[width][at] / self._start(width, at)


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
