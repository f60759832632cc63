"""How deep to draft: per cycle, the depth at which the rows' expected tokens per cost are most.

Pure bookkeeping over acceptance and costs; it imports no MLX. Since the cycle is exact at every depth, nothing decided
here can change an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from mtplx_core.cost_table import CostTable

EXPLORE_EVERY = 128
"""Cycles between two that are spent on a neighbouring depth, deeper and shallower in turn; under a hundredth."""
_HYSTERESIS = 1.03
"""What a deeper cycle must promise. A shallower one need not: where both seem to pay the same, drafts are a risk."""
_WEIGHT = 0.06
"""Of the newest trial; a row's acceptance is remembered over some sixteen trials."""


class Trial(NamedTuple):
    """What one cycle showed about one row."""

    depth: int
    accepted: int
    has_lookup: bool
    """Whether prompt lookup found something; else the head drafted, or nobody."""
    is_lookup_right: bool
    """Whether what it found was the token chosen; known at depth 0 too."""


@dataclass(slots=True)
class Odds:
    """How likely a row's drafts are accepted."""

    lookup_found: float = 0.3
    lookup_right: float = 0.6
    lookup_further: float = 0.8
    """At a later place, all before it accepted."""
    head_right: float = 0.0
    """At the first place, where lookup found nothing."""
    head_further: float = 0.35

    def learn(self, trial: Trial) -> None:
        self.lookup_found = _blend(self.lookup_found, trial.has_lookup)
        if trial.has_lookup:
            self.lookup_right = _blend(self.lookup_right, trial.is_lookup_right)
        elif trial.depth:
            self.head_right = _blend(self.head_right, trial.accepted > 0)
        for place in range(1, min(trial.depth, trial.accepted + 1)):
            if trial.has_lookup:
                self.lookup_further = _blend(self.lookup_further, trial.accepted > place)
            else:
                self.head_further = _blend(self.head_further, trial.accepted > place)

    def promises(self, depth: int, *, has_lookup: bool | None = None) -> tuple[list[float], list[float]]:
        """Tokens that 0 to `depth` drafts are expected to add: where lookup finds something, and where it does not.

        Each is weighed with how likely that is, or with 1 and 0 where `has_lookup` is known beforehand.
        """
        found = self.lookup_found if has_lookup is None else float(has_lookup)
        return (
            _chain(found * self.lookup_right, self.lookup_further, depth),
            _chain((1 - found) * self.head_right, self.head_further, depth),
        )

    def copy(self) -> Odds:
        return replace(self)


class DepthPolicy(Protocol):
    """Chooses the depth of each cycle."""

    def choose(self, rows: Sequence[Odds], found: Sequence[bool] | None = None, *, is_first: bool = False) -> int:
        """The depth of the next cycle over these rows.

        Args:
            rows: one each.
            found: where lookup finds something, if that is known.
            is_first: most of them wait for their first token, which comes sooner from a shorter cycle.
        """

    def see_cost(self, rows: int, depth: int, cost: float, *, head_depth: int) -> None:
        """Take in what a cycle took."""

    def head_depth(self, rows: Sequence[Odds], found: Sequence[bool], depth: int) -> int:
        """How many of the drafts the head makes where lookup finds nothing; behind them nothing is drafted there."""


@dataclass(frozen=True, slots=True)
class FixedDepth:
    """Always the same depth."""

    depth: int

    def choose(self, rows: Sequence[Odds], found: Sequence[bool] | None = None, *, is_first: bool = False) -> int:
        return self.depth

    def see_cost(self, rows: int, depth: int, cost: float, *, head_depth: int) -> None:
        """Nothing to learn."""

    def head_depth(self, rows: Sequence[Odds], found: Sequence[bool], depth: int) -> int:
        return 0 if all(found) else depth


@dataclass(slots=True)
class AdaptiveDepth:
    """The depth that pays most by what acceptance and costs were lately."""

    max_depth: int
    costs: CostTable
    """Of cycles in which the head drafts."""
    idle_costs: CostTable | None = None
    """Of cycles in which it does not; None: they cost the same."""
    _depth: int = 0
    _since_explored: int = 0
    _is_deeper_next: bool = True

    def choose(self, rows: Sequence[Odds], found: Sequence[bool] | None = None, *, is_first: bool = False) -> int:
        if is_first:
            return 0
        promise = _Promise(rows, found, self.max_depth)
        gains = [self._best(promise, depth).gain for depth in range(self.max_depth + 1)]
        best = max(range(len(gains)), key=gains.__getitem__)
        if gains[best] > (_HYSTERESIS if best > self._depth else 1.0) * gains[self._depth]:
            self._depth = best
        self._since_explored += 1
        if self._since_explored >= EXPLORE_EVERY:
            self._since_explored = 0
            return self._neighbour()
        return self._depth

    def see_cost(self, rows: int, depth: int, cost: float, *, head_depth: int) -> None:
        change = cost / self._cost(rows, depth, head_depth)
        with_head, without = self.costs.cost(rows, depth), self._idle.cost(rows, depth)
        if head_depth or not depth:
            self.costs.see(rows, depth, with_head * change)
        if (head_depth < depth or not depth) and self._idle is not self.costs:
            self._idle.see(rows, depth, without * change)

    def head_depth(self, rows: Sequence[Odds], found: Sequence[bool], depth: int) -> int:
        return self._best(_Promise(rows, found, depth), depth).head_depth

    def _neighbour(self) -> int:
        """The cost of a depth that is never tried would stay what the start table says, without drafting in it."""
        is_deeper, self._is_deeper_next = self._is_deeper_next, not self._is_deeper_next
        if self._depth in (0, self.max_depth):
            is_deeper = self._depth == 0
        return max(0, min(self._depth + (1 if is_deeper else -1), self.max_depth))

    @property
    def _idle(self) -> CostTable:
        return self.idle_costs or self.costs

    def _best(self, promise: _Promise, depth: int) -> _Way:
        """The best way to draft so deep. A row that the head drafts for gains little from its later drafts."""
        ways = (
            _Way(promise.tokens(depth, head_depth) / self._cost(promise.rows, depth, head_depth), head_depth)
            for head_depth in promise.head_depths(depth)
        )
        return max(ways, key=lambda way: way.gain)

    def _cost(self, rows: int, depth: int, head_depth: int) -> float:
        """Every draft of the head costs as much as the next."""
        idle = self._idle.cost(rows, depth)
        return idle + (self.costs.cost(rows, depth) - idle) * (head_depth / depth if depth else 1.0)


class _Way(NamedTuple):
    """One way to draft."""

    gain: float
    """Tokens per cost."""
    head_depth: int


class _Promise:
    """What the rows' drafts together are expected to bring, by depth.

    Args:
        rows: one each.
        found: where lookup finds something, if that is known.
        depth: the most drafts asked about.
    """

    def __init__(self, rows: Sequence[Odds], found: Sequence[bool] | None, depth: int) -> None:
        self.rows = len(rows)
        self._found = found
        known: Sequence[bool | None] = found if found is not None else [None] * len(rows)
        parts = [odds.promises(depth, has_lookup=has) for odds, has in zip(rows, known, strict=True)]
        self._by_lookup: list[float] = [sum(column) for column in zip(*(lookup for lookup, _ in parts), strict=True)]
        self._by_head: list[float] = [sum(column) for column in zip(*(head for _, head in parts), strict=True)]

    def tokens(self, depth: int, head_depth: int) -> float:
        """Tokens of a cycle of so many drafts, of which the head makes the first `head_depth`."""
        return self.rows + self._by_lookup[depth] + self._by_head[head_depth]

    def head_depths(self, depth: int) -> Sequence[int]:
        """How many of the drafts the head might make."""
        if self._found is None or not any(self._found):
            return (depth,)
        return (0,) if all(self._found) else range(depth, -1, -1)


def _chain(first: float, further: float, depth: int) -> list[float]:
    """Drafts accepted of 0 to `depth`, each only if all before it were."""
    accepted, chance = [0.0], first
    for _ in range(depth):
        accepted.append(accepted[-1] + chance)
        chance *= further
    return accepted


def _blend(known: float, outcome: bool) -> float:
    return known + _WEIGHT * (outcome - known)
