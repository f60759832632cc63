"""What attended keys add to a cycle's cost, and the depth chosen while long rows come and go. No engine, no clock."""

from __future__ import annotations

import numpy as np
import pytest

from mtplx_core.mtp.cost_table import CostTable
from mtplx_core.mtp.depth import AcceptanceRates, AdaptiveDepth
from mtplx_core.mtp.key_cost import KeyCost

ROWS, DEPTH = 8, 3
LIKELY = AcceptanceRates(lookup_found=0.0, head_right=0.75, head_further=0.75)
SHORT, LONG = (50, 400), (3000, 6000)


BY_POSITION = (2e-5, 2e-5)
"""Each position goes over the keys."""
AT_ONCE = (5e-5, 0.0)
"""All positions go over them at once."""


@pytest.mark.parametrize("plain", [0.0, 0.003])
@pytest.mark.parametrize("per_draft", [0.0, 0.001])
def test_both_parts_are_learned_from_cycles_of_two_depths(plain: float, per_draft: float) -> None:
    rng, learned = np.random.default_rng(2), KeyCost()

    for keys in rng.uniform(-4000, 4000, size=400):
        depth = int(rng.integers(0, 2)) * 3
        learned.see(depth, keys=keys, cost=(plain + per_draft * depth) * keys + rng.normal(scale=0.2))

    assert learned.of(0) == pytest.approx(plain, abs=1e-4)
    assert learned.of(3) == pytest.approx(plain + 3 * per_draft, abs=1e-4)


def test_cycles_of_one_depth_are_taken_to_tell_of_the_others() -> None:
    learned = KeyCost()

    for _ in range(20_000):  # as many as make what was assumed weigh next to nothing
        learned.see(2, keys=3000.0, cost=3.0)

    assert learned.of(2) == pytest.approx(0.001, rel=0.01)
    assert 0 < learned.of(0) <= learned.of(2) <= learned.of(3) < 0.0015


def test_keys_never_make_a_cycle_cheaper() -> None:
    learned = KeyCost(1e-5, 1e-5)

    for depth in (0, 3):
        for _ in range(100):
            learned.see(depth, keys=3000.0, cost=-1.0)

    assert [learned.of(depth) for depth in range(4)] == [0.0] * 4


def test_few_keys_more_change_little_of_what_was_measured() -> None:
    learned = KeyCost(1e-5)

    for _ in range(20):
        learned.see(0, keys=8.0, cost=0.1)

    assert learned.of(0) == pytest.approx(1e-5, rel=0.5)


def test_key_costs_more_on_a_slower_machine() -> None:
    learned = KeyCost(1e-5, 2e-5)

    learned.scale(2.0)

    assert learned.of(1) == pytest.approx(6e-5)


def test_table_says_what_a_cycle_over_other_rows_will_cost() -> None:
    table = CostTable({(2, 0): 1.0, (2, 1): 1.5}, row_keys=256, key_cost=KeyCost(1e-4, 1e-4))

    assert table.cost(2, 0) == 1.0
    assert table.cost(2, 0, 1512) == pytest.approx(1.1)
    assert table.cost(2, 1, 1512) == pytest.approx(1.7)

    for _ in range(200):
        table.see(2, 0, 1.2, 2512)

    assert table.cost(2, 0, 2512) == pytest.approx(1.2)
    assert table.cost(2, 0, 512) == pytest.approx(1.0)
    assert table.cost(2, 1, 512) == pytest.approx(1.5)


def test_cycle_over_no_keys_costs_something() -> None:
    table = CostTable({(1, 0): 1.0}, row_keys=2000, key_cost=KeyCost(1.0))

    assert table.cost(1, 0, 0) == 0.25


class Lane:
    """A policy over rows of which one after the other leaves, and is followed by another."""

    def __init__(self, key: tuple[float, float], *, measured: KeyCost | None = None, tells_keys: bool = True) -> None:
        self._key = key
        costs = {(ROWS, depth): self._true_cost(depth, 256 * ROWS) for depth in range(DEPTH + 1)}
        self._policy = AdaptiveDepth(DEPTH, CostTable(costs, row_keys=256, key_cost=measured))
        self._tells_keys = tells_keys
        self._rng = np.random.default_rng(1)

    def lost(self, lengths: tuple[int, int], *, cycles: int) -> list[float]:
        """By cycle, the share of the tokens per cost that the best depth would have brought."""
        rows = self._rng.integers(*lengths, ROWS)
        shares = []
        for cycle in range(cycles):
            gains = self._gains(int(rows.sum()))
            keys = int(rows.sum()) if self._tells_keys else None
            depth = self._policy.choose([LIKELY] * ROWS, [False] * ROWS, keys=keys).depth
            cost = self._true_cost(depth, int(rows.sum())) * self._rng.lognormal(sigma=0.05)
            self._policy.see_cost(ROWS, depth, cost, head_depth=0, keys=keys)
            shares.append(1 - gains[depth] / max(gains))
            rows += 2
            if cycle % 40 == 39:
                rows[self._rng.integers(ROWS)] = self._rng.integers(*lengths)
        return shares

    def _true_cost(self, depth: int, keys: int) -> float:
        plain, per_draft = self._key
        return 1.0 + 0.4 * depth + (plain + per_draft * depth) * keys

    def _gains(self, keys: int) -> list[float]:
        tokens = LIKELY.by_head(DEPTH, has_lookup=False)
        return [(1 + tokens[depth]) / self._true_cost(depth, keys) for depth in range(DEPTH + 1)]


@pytest.mark.parametrize(
    ("key", "measured"),
    [(BY_POSITION, None), (BY_POSITION, KeyCost(1e-5, 3e-5)), (AT_ONCE, KeyCost(4.5e-5))],
    ids=["nothing measured", "by position", "at once"],
)
def test_lane_is_back_at_its_best_depth_soon_after_long_rows_came_or_went(
    key: tuple[float, float], measured: KeyCost | None
) -> None:
    lane = Lane(key, measured=measured)
    lane.lost(SHORT, cycles=300)

    for lengths in (LONG, SHORT, LONG, SHORT):
        shares = lane.lost(lengths, cycles=400)
        assert np.mean(shares[150:]) < 0.02, lengths


def test_lane_that_is_told_no_keys_stays_far_from_its_best_depth_after_long_rows_went() -> None:
    lane = Lane(BY_POSITION, tells_keys=False)
    lane.lost(SHORT, cycles=300)
    lane.lost(LONG, cycles=400)

    assert np.mean(lane.lost(SHORT, cycles=400)[150:]) > 0.05
