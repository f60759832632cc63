"""A depth policy for tests of engines."""

from __future__ import annotations

from collections.abc import Sequence

from mtplx_core.mtp.depth import AcceptanceRates, Drafting


class Scheduled:
    """Goes through a list of depths, over and over, and lets lookup and the head draft in all mixtures."""

    def __init__(self, *depths: int) -> None:
        self._depths = depths
        self._cycles = 0

    def choose(
        self,
        rows: Sequence[AcceptanceRates],
        found: Sequence[bool] | None = None,
        *,
        width: int = 0,
        keys: int | None = None,
        is_first: bool = False,
    ) -> Drafting:
        self._cycles += 1
        depth = self._depths[self._cycles % len(self._depths)]
        known = found if found is not None else [True] * len(rows)
        by_lookup = tuple(has and (self._cycles + row) % 4 > 0 for row, has in enumerate(known))
        head_depth = depth if self._cycles % 2 else min(depth, self._cycles // 2 % 3)
        return Drafting(depth, head_depth, by_lookup)

    def see_cost(self, rows: int, depth: int, cost: float, *, head_depth: int, keys: int | None = None) -> None:
        """Nothing to learn."""
