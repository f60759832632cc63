"""How deep to draft, and from what: per cycle, the way at which the rows' expected tokens per cost are most.

Pure bookkeeping over acceptance and costs; it imports no MLX. Since the cycle is exact at every depth, nothing decided
here can change an answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from mtplx_core.mtp.cost_table import CostTable, assumed_costs, assumed_draft_shares

EXPLORE_EVERY = 256
"""Cycles in which `EXPLORE_CYCLES` are spent on a neighbouring depth, deeper and shallower in turn."""
EXPLORE_CYCLES = 2
"""In a row, since the first of a kind tells nothing."""
_STEP_CYCLES = 3
"""Before the first cycles go one deeper."""
_HYSTERESIS = 1.03
"""What a deeper cycle must promise. A shallower one need not: where both seem to pay the same, drafts are a risk."""
_WEIGHT = 0.06
"""Of the newest trial; a row's acceptance is remembered over some sixteen trials."""
_PRIOR_TRIALS = 3
"""What is expected beforehand weighs as much as so many."""


class CycleOutcome(NamedTuple):
    """What one cycle showed about one row."""

    depth: int
    accepted: int
    has_lookup: bool
    """Whether prompt lookup found something."""
    is_lookup_right: bool
    """Whether what it found was the token chosen; known at depth 0 too."""
    is_by_lookup: bool
    """Whether that was drafted; else the head drafted, or nobody."""


@dataclass(slots=True)
class AcceptanceRates:
    """How likely a row's drafts are accepted."""

    lookup_found: float = 0.3
    lookup_right: float = 0.6
    lookup_further: float = 0.8
    """At a later place, all before it accepted."""
    head_right: float = 0.0
    """At the first place, where lookup found nothing."""
    head_instead: float = 0.0
    """At the first place, where lookup found something."""
    head_further: float = 0.35

    trials: dict[str, int] = field(default_factory=dict)
    """How many each of these was learned from."""

    def learn(self, trial: CycleOutcome) -> None:
        self._move("lookup_found", trial.has_lookup)
        if trial.has_lookup:
            self._move("lookup_right", trial.is_lookup_right)
        if trial.depth and not trial.is_by_lookup:
            self._move("head_instead" if trial.has_lookup else "head_right", trial.accepted > 0)
        for place in range(1, min(trial.depth, trial.accepted + 1)):
            self._move("lookup_further" if trial.is_by_lookup else "head_further", trial.accepted > place)

    def by_lookup(self, depth: int) -> list[float]:
        """Tokens that 0 to `depth` drafts of what lookup found are expected to add."""
        return _chain(self.lookup_right, self.lookup_further, depth)

    def by_head(self, depth: int, *, has_lookup: bool) -> list[float]:
        """The same of the head's."""
        return _chain(self.head_instead if has_lookup else self.head_right, self.head_further, depth)

    def copy(self) -> AcceptanceRates:
        return replace(self, trials=dict(self.trials))

    def _move(self, name: str, outcome: bool) -> None:
        self.trials[name] = count = self.trials.get(name, 0) + 1
        known = getattr(self, name)
        setattr(self, name, known + max(_WEIGHT, 1 / (count + _PRIOR_TRIALS)) * (outcome - known))


class Drafting(NamedTuple):
    """What a cycle drafts."""

    depth: int
    head_depth: int
    """How many of the drafts the head makes, for rows that do not draft by lookup; behind them nothing is drafted."""
    by_lookup: tuple[bool, ...]
    """Of each row, whether it drafts what lookup finds."""


class DepthPolicy(Protocol):
    """Chooses the depth of each cycle."""

    def choose(
        self,
        rows: Sequence[AcceptanceRates],
        found: Sequence[bool] | None = None,
        *,
        width: int = 0,
        keys: int | None = None,
        is_first: bool = False,
    ) -> Drafting:
        """What the next cycle over these rows drafts.

        Args:
            rows: one each.
            found: where lookup finds something, if that is known; nothing else can then be drafted by lookup.
            width: slots that the cycle goes over, empty ones included; 0: as many as rows.
            keys: that all rows together attend to; None: as many as where costs were measured.
            is_first: most of them wait for their first token, which comes sooner from a shorter cycle.
        """

    def see_cost(self, rows: int, depth: int, cost: float, *, head_depth: int, keys: int | None = None) -> None:
        """Take in what a cycle took."""


@dataclass(frozen=True, slots=True)
class FixedDepth:
    """Always the same depth."""

    depth: int

    def choose(
        self,
        rows: Sequence[AcceptanceRates],
        found: Sequence[bool] | None = None,
        *,
        width: int = 0,
        keys: int | None = None,
        is_first: bool = False,
    ) -> Drafting:
        by_lookup = ExpectedTokens(rows, found, self.depth).by_lookup(self.depth, self.depth)
        return Drafting(self.depth, 0 if found is not None and all(by_lookup) else self.depth, by_lookup)

    def see_cost(self, rows: int, depth: int, cost: float, *, head_depth: int, keys: int | None = None) -> None:
        """Nothing to learn."""


@dataclass(slots=True)
class AdaptiveDepth:
    """The depth that pays most by what acceptance and costs were lately."""

    max_depth: int
    costs: CostTable
    """Of cycles in which the head does not draft."""
    draft_shares: CostTable | None = None
    """Of each draft of the head, in plain cycles of as many rows; None: nothing."""
    head_depth_max: int | None = None
    """The most of a cycle's drafts that the head makes; None: all of them."""
    _depth: int = 0
    _cycles_at: Counter[int] = field(default_factory=Counter)
    """By depth."""
    _cycles: int = 0
    _kinds_seen: set[tuple[int, int, bool]] = field(default_factory=set)

    def choose(
        self,
        rows: Sequence[AcceptanceRates],
        found: Sequence[bool] | None = None,
        *,
        width: int = 0,
        keys: int | None = None,
        is_first: bool = False,
    ) -> Drafting:
        promise = ExpectedTokens(rows, found, self.max_depth)
        ways = [self._best(promise, depth, width or len(rows), keys) for depth in range(self.max_depth + 1)]
        depth = 0 if is_first else self._settled(ways)
        self._cycles_at[depth] += 1
        return Drafting(depth, ways[depth].head_depth, promise.by_lookup(depth, ways[depth].head_depth))

    def see_cost(self, rows: int, depth: int, cost: float, *, head_depth: int, keys: int | None = None) -> None:
        if (kind := (rows, depth, head_depth > 0)) not in self._kinds_seen:
            self._kinds_seen.add(kind)
            return  # it may have paid for what is done once
        learned = self.costs.learned(rows, depth, keys)
        change = cost / (learned + head_depth * self._draft_cost(rows, keys))
        self.costs.see(rows, depth, change * learned, keys)
        if head_depth and self.draft_shares is not None:
            self.draft_shares.see(rows, 0, change * self.draft_shares.learned(rows, 0))

    def _settled(self, ways: Sequence[_Way]) -> int:
        """The depth to stay at or to go to, or now and then the one beside it."""
        best = max(range(len(ways)), key=lambda depth: ways[depth].gain)
        if ways[best].gain > (_HYSTERESIS if best > self._depth else 1.0) * ways[self._depth].gain:
            self._depth = min(best, self._reach)
        self._cycles += 1
        if self._cycles % EXPLORE_EVERY >= EXPLORE_EVERY - EXPLORE_CYCLES:
            return self._neighbour()
        return self._depth

    @property
    def _reach(self) -> int:
        """The shallowest depth that was tried too little to tell what deeper ones cost.

        Were the first cycles deep, and dearer than the start table says, nothing would tell whether all are or only the
        deep ones.
        """
        return next(depth for depth in range(self.max_depth + 1) if self._is_frontier(depth))

    def _is_frontier(self, depth: int) -> bool:
        return depth == self.max_depth or self._cycles_at[depth] < _STEP_CYCLES

    def _neighbour(self) -> int:
        """The cost of a depth that is never tried would stay what the start table says, without drafting in it."""
        is_deeper = self._cycles // EXPLORE_EVERY % 2 == 0
        if self._depth in (0, self.max_depth):
            is_deeper = self._depth == 0
        return max(0, min(self._depth + (1 if is_deeper else -1), self.max_depth))

    def _best(self, promise: ExpectedTokens, depth: int, width: int, keys: int | None) -> _Way:
        """The best way to draft so deep. A row that the head drafts for gains little from its later drafts."""
        cost, draft = self.costs.cost(width, depth, keys), self._draft_cost(width, keys)
        ways = (
            _Way(promise.tokens(depth, head_depth) / (cost + head_depth * draft), head_depth)
            for head_depth in promise.head_depths(
                depth if self.head_depth_max is None else min(depth, self.head_depth_max)
            )
        )
        return max(ways, key=lambda way: way.gain)

    def _draft_cost(self, rows: int, keys: int | None) -> float:
        """Every draft of the head costs as much as the next, and with more keys as much more as a plain cycle."""
        if self.draft_shares is None:
            return 0.0
        return self.draft_shares.cost(rows, 0) * self.costs.cost(rows, 0, keys)


def assumed_policy(*, rows: int, depth: int, head_depth_max: int | None) -> DepthPolicy:
    """The policy of a lane of which nothing was measured; `head_depth_max` is None without a head."""
    if depth == 0:
        return FixedDepth(0)
    shares = None if head_depth_max is None else assumed_draft_shares()
    return AdaptiveDepth(depth, assumed_costs(rows=rows, depth=depth), shares, head_depth_max)


class _Way(NamedTuple):
    """One way to draft."""

    gain: float
    """Tokens per cost."""
    head_depth: int


class ExpectedTokens:
    """What the rows' drafts together are expected to bring, by depth.

    Args:
        rows: one each.
        found: where lookup finds something, if that is known.
        depth: the most drafts asked about.
    """

    def __init__(self, rows: Sequence[AcceptanceRates], found: Sequence[bool] | None, depth: int) -> None:
        self.rows = len(rows)
        self._is_known = found is not None
        self._found = [float(has) for has in found] if found is not None else [odds.lookup_found for odds in rows]
        self._either = [(odds.by_lookup(depth), odds.by_head(depth, has_lookup=True)) for odds in rows]
        """Of each row, where lookup finds something."""
        self._by_head = [0.0] * (depth + 1)
        """Of all rows, where it does not."""
        for chance, odds in zip(self._found, rows, strict=True):
            if chance < 1:
                for place, tokens in enumerate(odds.by_head(depth, has_lookup=False)):
                    self._by_head[place] += (1 - chance) * tokens

    def tokens(self, depth: int, head_depth: int) -> float:
        """Tokens of a cycle of so many drafts, of which the head makes the first `head_depth`."""
        either = zip(self._found, self._either, strict=True)
        where_found = sum(chance * max(lookup[depth], head[head_depth]) for chance, (lookup, head) in either)
        return self.rows + where_found + self._by_head[head_depth]

    def by_lookup(self, depth: int, head_depth: int) -> tuple[bool, ...]:
        """Which rows draft by lookup, in a cycle of so many drafts."""
        either = zip(self._found, self._either, strict=True)
        return tuple(chance > 0 and lookup[depth] >= head[head_depth] for chance, (lookup, head) in either)

    def head_depths(self, most: int) -> Sequence[int]:
        """How many of the drafts the head might make."""
        return range(most + 1) if self._is_known and any(self._found) else (most,)


def _chain(first: float, further: float, depth: int) -> list[float]:
    """Drafts accepted of 0 to `depth`, each only if all before it were."""
    accepted, chance = [0.0], first
    for _ in range(depth):
        accepted.append(accepted[-1] + chance)
        chance *= further
    return accepted
