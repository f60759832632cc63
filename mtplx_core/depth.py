"""How deep to draft: per cycle, the depth at which the rows' expected tokens per cost are most.

Pure bookkeeping over acceptance and costs; it imports no MLX. Since the cycle is exact at every depth, nothing decided
here can change an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from mtplx_core.cost_table import CostTable

EXPLORE_EVERY = 128
"""Cycles between two that are spent on a neighbouring depth, deeper and shallower in turn; under a hundredth."""
_HYSTERESIS = 1.03
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
    head_right: float = 0.0
    """At the first place, where lookup found nothing."""
    further: float = 0.6
    """At a later place, all before it accepted."""

    def learn(self, trial: Trial) -> None:
        self.lookup_found = _blend(self.lookup_found, trial.has_lookup)
        if trial.has_lookup:
            self.lookup_right = _blend(self.lookup_right, trial.is_lookup_right)
        elif trial.depth:
            self.head_right = _blend(self.head_right, trial.accepted > 0)
        for place in range(1, min(trial.depth, trial.accepted + 1)):
            self.further = _blend(self.further, trial.accepted > place)

    def expected_tokens(self, depth: int) -> float:
        """Tokens one cycle of this depth is expected to commit."""
        likely = self.lookup_found * self.lookup_right + (1 - self.lookup_found) * self.head_right
        total = 1.0
        for _ in range(depth):
            total += likely
            likely *= self.further
        return total

    def copy(self) -> Odds:
        return Odds(self.lookup_found, self.lookup_right, self.head_right, self.further)


class DepthPolicy(Protocol):
    """Chooses the depth of each cycle."""

    def choose(self, rows: Sequence[Odds]) -> int:
        """The depth of the next cycle over these rows."""

    def see_cost(self, rows: int, depth: int, cost: float) -> None:
        """Take in what a cycle took."""


@dataclass(frozen=True, slots=True)
class FixedDepth:
    """Always the same depth."""

    depth: int

    def choose(self, rows: Sequence[Odds]) -> int:
        return self.depth

    def see_cost(self, rows: int, depth: int, cost: float) -> None:
        """Nothing to learn."""


@dataclass(slots=True)
class AdaptiveDepth:
    """The depth that pays most by what acceptance and costs were lately."""

    max_depth: int
    costs: CostTable
    _depth: int = 0
    _since_explored: int = 0
    _is_deeper_next: bool = True
    _gains: list[float] = field(default_factory=list)

    def choose(self, rows: Sequence[Odds]) -> int:
        self._gains = [self._gain(rows, depth) for depth in range(self.max_depth + 1)]
        best = max(range(len(self._gains)), key=self._gains.__getitem__)
        if self._gains[best] > _HYSTERESIS * self._gains[self._depth]:
            self._depth = best
        self._since_explored += 1
        if self._since_explored >= EXPLORE_EVERY:
            self._since_explored = 0
            return self._neighbour()
        return self._depth

    def see_cost(self, rows: int, depth: int, cost: float) -> None:
        self.costs.see(rows, depth, cost)

    def _neighbour(self) -> int:
        """The cost of a depth that is never tried would stay what the start table says, without drafting in it."""
        is_deeper, self._is_deeper_next = self._is_deeper_next, not self._is_deeper_next
        if self._depth in (0, self.max_depth):
            is_deeper = self._depth == 0
        return max(0, min(self._depth + (1 if is_deeper else -1), self.max_depth))

    def _gain(self, rows: Sequence[Odds], depth: int) -> float:
        return sum(odds.expected_tokens(depth) for odds in rows) / self.costs.cost(len(rows), depth)


def _blend(known: float, outcome: bool) -> float:
    return known + _WEIGHT * (outcome - known)
