"""Depth policy, cost table and acceptance odds. Pure functions; runs on no engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from mtplx_core.mtp.cost_table import CostTable
from mtplx_core.mtp.depth import (
    EXPLORE_CYCLES,
    EXPLORE_EVERY,
    AcceptanceRates,
    AdaptiveDepth,
    CycleOutcome,
    Drafting,
    FixedDepth,
)

FLAT = CostTable({(rows, depth): 1.0 + 0.01 * depth for rows in (1, 8) for depth in range(4)})
STEEP = CostTable({(rows, depth): 1.0 + depth for rows in (1, 8) for depth in range(4)})


def odds(*, right: float, further: float = 0.8) -> AcceptanceRates:
    return AcceptanceRates(0.5, right, further, head_right=right, head_instead=right, head_further=further)


def settled(policy: AdaptiveDepth, rows: Sequence[AcceptanceRates], found: Sequence[bool] | None = None) -> Drafting:
    """What a policy chooses once it has had time to go as deep as it likes."""
    for _ in range(25):
        chosen = policy.choose(rows, found)
    return chosen


def see(policy: AdaptiveDepth, depth: int, cost: float, *, head_depth: int = 0, times: int = 20) -> None:
    for _ in range(times):
        policy.see_cost(1, depth, cost, head_depth=head_depth)


def test_policy_drafts_deep_when_drafts_are_right_and_positions_cheap() -> None:
    assert settled(AdaptiveDepth(3, FLAT), [odds(right=0.8)] * 4).depth == 3


def test_first_cycles_go_deeper_step_by_step() -> None:
    policy = AdaptiveDepth(3, FLAT)

    assert [policy.choose([odds(right=0.8)]).depth for _ in range(12)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [policy.choose([odds(right=right)]).depth for right in (0.0, 0.8)] == [0, 3]


def test_depths_never_tried_are_judged_by_the_nearest_that_was() -> None:
    policy = AdaptiveDepth(3, CostTable({(1, depth): 1.0 + 0.1 * depth for depth in range(4)}))
    chosen = []

    for _ in range(12):
        chosen.append(policy.choose([odds(right=0.8)]).depth)
        see(policy, chosen[-1], 1.0 + chosen[-1])

    assert chosen == [0, 0, 0, 1, 1, 1, 2, 0, 0, 0, 0, 0]


def test_policy_does_not_draft_when_positions_cost_more_than_they_bring() -> None:
    assert AdaptiveDepth(3, STEEP).choose([odds(right=0.8)] * 4).depth == 0


def test_policy_does_not_draft_when_drafts_are_wrong() -> None:
    assert AdaptiveDepth(3, FLAT).choose([odds(right=0.0)]).depth == 0


def test_cycle_of_first_tokens_is_as_short_as_can_be() -> None:
    policy = AdaptiveDepth(3, FLAT)

    settled(policy, [odds(right=0.8)] * 4)

    assert policy.choose([odds(right=0.8)] * 4, is_first=True).depth == 0
    assert policy.choose([odds(right=0.8)] * 4).depth == 3
    assert FixedDepth(2).choose([odds(right=0.8)], is_first=True).depth == 2


def test_policy_weighs_all_rows_of_the_batch() -> None:
    costs = CostTable({(4, 0): 1.0, (4, 1): 1.5})

    assert settled(AdaptiveDepth(1, costs), [odds(right=0.9)] + [odds(right=0.1)] * 3).depth == 0
    assert settled(AdaptiveDepth(1, costs), [odds(right=0.9)] * 3 + [odds(right=0.1)]).depth == 1


def test_policy_goes_deeper_for_a_clear_gain_only_and_shallower_for_any() -> None:
    policy = AdaptiveDepth(1, CostTable({(1, 0): 1.0, (1, 1): 1.5}))
    settled(policy, [odds(right=0.51)])

    chosen = [policy.choose([odds(right=right)]).depth for right in (0.51, 0.6, 0.51, 0.49, 0.51)]

    assert chosen == [0, 1, 1, 0, 0]


def test_policy_explores_in_less_than_a_hundredth_of_the_cycles() -> None:
    policy = AdaptiveDepth(2, STEEP)

    chosen = [policy.choose([odds(right=0.1)]).depth for _ in range(20 * EXPLORE_EVERY)]

    assert chosen.count(1) == 20 * EXPLORE_CYCLES
    assert chosen.count(0) == len(chosen) - 20 * EXPLORE_CYCLES
    assert EXPLORE_CYCLES / EXPLORE_EVERY < 0.01


def test_policy_explores_shallower_cycles_as_well() -> None:
    policy = AdaptiveDepth(1, CostTable({(1, 0): 1.0, (1, 1): 1.0}))

    settled(policy, [odds(right=0.7)])

    chosen = [policy.choose([odds(right=0.7)]).depth for _ in range(4 * EXPLORE_EVERY)]

    assert chosen.count(0) == 4 * EXPLORE_CYCLES


def test_policy_stops_drafting_once_a_plain_cycle_turns_out_cheaper_than_assumed() -> None:
    policy = AdaptiveDepth(1, CostTable({(1, 0): 1.0, (1, 1): 1.1}))
    see(policy, 1, 2.0, head_depth=1)
    before = settled(policy, [odds(right=0.3)]).depth

    see(policy, 0, 1.0)

    assert before == 1
    assert policy.choose([odds(right=0.3)]).depth == 0


def test_policy_returns_to_drafting_when_costs_turn_out_lower() -> None:
    policy = AdaptiveDepth(1, CostTable({(1, 0): 1.0, (1, 1): 3.0}))
    before = settled(policy, [odds(right=0.7)]).depth

    see(policy, 0, 1.0)
    see(policy, 1, 1.1, head_depth=1)

    assert before == 0
    assert policy.choose([odds(right=0.7)]).depth == 1


def test_first_cycle_of_a_kind_tells_nothing() -> None:
    costs = CostTable({(1, 0): 1.0, (1, 1): 1.2})
    policy = AdaptiveDepth(1, costs)

    policy.see_cost(1, 0, 99.0, head_depth=0)
    policy.see_cost(1, 1, 99.0, head_depth=0)
    policy.see_cost(1, 1, 99.0, head_depth=1)

    assert (costs.cost(1, 0), costs.cost(1, 1)) == (1.0, 1.2)


def test_fixed_depth_never_moves() -> None:
    assert FixedDepth(2).choose([odds(right=0.0)]).depth == 2


@pytest.mark.parametrize(
    ("trial", "field", "rises"),
    [
        (CycleOutcome(0, 0, True, True, True), "lookup_right", True),
        (CycleOutcome(0, 0, True, False, True), "lookup_right", False),
        (CycleOutcome(1, 0, True, True, False), "lookup_right", True),
        (CycleOutcome(1, 1, False, False, False), "head_right", True),
        (CycleOutcome(1, 0, False, False, False), "head_right", False),
        (CycleOutcome(1, 1, True, False, False), "head_instead", True),
        (CycleOutcome(1, 0, True, True, False), "head_instead", False),
        (CycleOutcome(2, 2, False, False, False), "head_further", True),
        (CycleOutcome(2, 1, True, False, False), "head_further", False),
        (CycleOutcome(2, 2, True, True, True), "lookup_further", True),
        (CycleOutcome(2, 1, True, True, True), "lookup_further", False),
    ],
)
def test_odds_move_with_what_a_trial_showed(trial: CycleOutcome, field: str, rises: bool) -> None:
    row = odds(right=0.5)
    before = getattr(row, field)

    row.learn(trial)

    assert (getattr(row, field) > before) == rises
    assert getattr(row, field) != before


def test_odds_of_the_head_do_not_move_where_it_did_not_draft() -> None:
    row = odds(right=0.5)

    row.learn(CycleOutcome(0, 0, False, False, False))
    row.learn(CycleOutcome(1, 1, True, True, True))

    assert (row.head_right, row.head_instead) == (0.5, 0.5)


def test_what_is_expected_beforehand_gives_way_to_a_few_trials() -> None:
    row = AcceptanceRates(head_right=0.8)

    learnt = []
    for _ in range(40):
        row.learn(CycleOutcome(1, 0, False, False, False))
        learnt.append(row.head_right)

    assert learnt[2] < 0.5
    assert learnt[-1] / learnt[-2] == pytest.approx(1 - 0.06)
    assert row.copy() == row
    assert row.copy().trials is not row.trials


def test_promised_tokens_count_the_chain_of_drafts() -> None:
    row = odds(right=0.5, further=0.5)

    assert row.by_lookup(3) == row.by_head(3, has_lookup=True) == pytest.approx([0, 0.5, 0.75, 0.875])


@pytest.mark.parametrize(
    ("head_instead", "found", "by_lookup", "head_depth"),
    [
        (0.9, [True, True], (False, True), 1),
        (0.5, [True, True], (True, True), 0),
        (0.9, [False, True], (False, True), 1),
        (0.9, None, (False, True), 1),
        (0.5, None, (True, True), 1),
    ],
)
def test_row_drafts_from_the_head_instead_of_a_lookup_that_is_right_less_often(
    head_instead: float, found: list[bool] | None, by_lookup: tuple[bool, ...], head_depth: int
) -> None:
    often_wrong = AcceptanceRates(lookup_right=0.6, head_right=0.5, head_instead=head_instead)
    always_right = AcceptanceRates(lookup_right=1.0, head_right=0.5, head_instead=head_instead)
    rows = [often_wrong, always_right]

    policy = AdaptiveDepth(1, FLAT, CostTable({(1, 0): 0.01}))
    assert settled(policy, rows, found) == Drafting(1, head_depth, by_lookup)
    assert FixedDepth(1).choose(rows, found) == Drafting(1, head_depth, by_lookup)


def test_lookup_drafts_where_the_head_is_better_but_not_worth_its_cost() -> None:
    row = AcceptanceRates(lookup_right=0.6, head_right=0.7, head_instead=0.7)
    costs = CostTable({(1, 0): 1.0, (1, 1): 1.1})

    assert settled(AdaptiveDepth(1, costs, CostTable({(1, 0): 0.4})), [row], [True]) == Drafting(1, 0, (True,))
    assert settled(AdaptiveDepth(1, costs, CostTable({(1, 0): 0.01})), [row], [True]) == Drafting(1, 1, (False,))


def test_policy_drafts_deep_where_lookup_is_right_and_not_at_all_where_the_head_is_wrong() -> None:
    row = AcceptanceRates(lookup_right=0.9, lookup_further=0.9, head_right=0.01)
    policy = AdaptiveDepth(3, CostTable({(1, depth): 1.0 + 0.1 * depth for depth in range(4)}))

    settled(policy, [row], [True])

    assert [policy.choose([row], [found]).depth for found in (True, False, True)] == [3, 0, 3]


def test_drafts_of_the_head_have_a_cost_of_their_own() -> None:
    shares = CostTable({(1, 0): 0.9})
    policy = AdaptiveDepth(1, CostTable({(1, 0): 1.0, (1, 1): 1.1}), shares)

    assert settled(policy, [odds(right=0.5)], [False]).depth == 0
    assert settled(policy, [odds(right=0.5)], [True]).depth == 1

    see(policy, 1, 3.0)
    see(policy, 0, 1.0)

    assert settled(policy, [odds(right=0.5)], [True]).depth == 0
    assert shares.cost(1, 0) == 0.9


@pytest.mark.parametrize(
    ("head_right", "found", "depths"),
    [
        (0.5, [True, False], (3, 1)),
        (0.01, [True, False], (3, 0)),
        (0.5, [True, True], (3, 0)),
        (0.5, [False, False], (1, 1)),
    ],
)
def test_head_drafts_no_further_than_pays_beside_rows_that_lookup_drafts_for(
    head_right: float, found: list[bool], depths: tuple[int, int]
) -> None:
    row = AcceptanceRates(lookup_right=0.95, lookup_further=0.95, head_right=head_right, head_further=0.05)
    costs = CostTable({(2, depth): 1.0 + 0.05 * depth for depth in range(4)})
    policy = AdaptiveDepth(3, costs, CostTable({(1, 0): 0.05}))

    assert settled(policy, [row, row], found)[:2] == depths


@pytest.mark.parametrize(
    ("lookup_right", "found", "depths"),
    [
        (0.95, [True], (7, 0)),
        (0.95, None, (7, 3)),
        (0.95, [False], (3, 3)),
        (0.01, [True], (3, 3)),
        (0.01, None, (3, 3)),
    ],
    ids=str,
)
def test_lookup_drafts_deeper_than_the_head_was_made_for(
    lookup_right: float, found: list[bool] | None, depths: tuple[int, int]
) -> None:
    row = AcceptanceRates(0.9, lookup_right, lookup_further=0.95, head_right=0.9, head_instead=0.9, head_further=0.9)
    costs = CostTable({(1, depth): 1.0 + 0.05 * depth for depth in range(8)})
    policy = AdaptiveDepth(7, costs, CostTable({(1, 0): 0.05}), head_depth_max=3)

    assert settled(policy, [row], found)[:2] == depths


def test_cycle_in_which_the_head_drafts_tells_of_both_costs() -> None:
    costs, shares = CostTable({(1, 0): 1.0, (1, 2): 1.6}), CostTable({(1, 0): 0.2})
    policy = AdaptiveDepth(2, costs, shares)

    see(policy, 2, 2.0, head_depth=2)
    see(policy, 0, 1.0)

    assert costs.cost(1, 0) == 1.0
    assert costs.cost(1, 2) == pytest.approx(1.6)
    assert shares.cost(1, 0) == pytest.approx(0.2)

    for _ in range(300):
        see(policy, 2, 1.6, times=1)
        see(policy, 2, 2.4, head_depth=2, times=1)

    assert costs.cost(1, 2) == pytest.approx(1.6, rel=0.1)
    assert shares.cost(1, 0) == pytest.approx(0.4, rel=0.1)


def test_policy_counts_what_a_cycle_costs_over_empty_slots_too() -> None:
    costs = CostTable({(1, 0): 1.0, (1, 1): 1.05, (8, 0): 2.0, (8, 1): 4.0})

    for width, depth in ((0, 1), (8, 0)):
        policy = AdaptiveDepth(1, costs)
        assert [policy.choose([odds(right=0.6)], width=width).depth for _ in range(6)][-1] == depth


def test_policy_drafts_at_widths_that_the_probe_had_no_time_for() -> None:
    policy = AdaptiveDepth(3, CostTable({(1, 0): 0.13, (1, 1): 0.15, (1, 2): 0.18, (1, 3): 0.19, (16, 0): 0.31}))

    assert settled(policy, [odds(right=0.6)] * 4).depth > 0


def test_drafts_stay_dear_though_deeper_cycles_look_cheaper_than_shallower_ones() -> None:
    rng = np.random.default_rng(4)
    costs, shares = CostTable({(1, 0): 1.0, (1, 1): 1.1}), CostTable({(1, 0): 0.2}, has_mood=False)
    policy = AdaptiveDepth(1, costs, shares)

    for noise in rng.lognormal(sigma=0.1, size=20_000):
        policy.see_cost(1, 0, 1.0 * noise, head_depth=0)
        policy.see_cost(1, 1, 0.9 * noise, head_depth=0)
        policy.see_cost(1, 1, 1.1 * noise, head_depth=1)

    assert shares.cost(1, 0) == pytest.approx(0.2, rel=0.2)


@pytest.mark.parametrize("further", [0.5, 0.7])
def test_depth_is_near_the_best_though_the_probe_was_noisy_and_cut_short(further: float) -> None:
    """Rows join one by one, and what was probed at the full width tells little of its deep cycles."""
    shares = [_share_of_the_best(np.random.default_rng(seed), further) for seed in range(60)]

    assert min(shares) > 0.8
    assert sum(share > 0.9 for share in shares) > 50


def _share_of_the_best(rng: np.random.Generator, further: float) -> float:
    """Tokens per cost over 60 cycles at the full width, of what the best depth would bring."""
    deepest, cut = 7, rng.integers(1, 4)
    probed = {(1, depth): _real_cost(1, depth) for depth in range(deepest + 1)}
    probed |= {(8, depth): _real_cost(8, depth) * rng.lognormal(sigma=0.15) for depth in range(cut + 1)}
    policy = AdaptiveDepth(deepest, CostTable(probed))
    tokens = cost = 0.0
    for cycle, width in enumerate([1] * 8 + [2] * 6 + [3] * 6 + [5] * 6 + [6] * 4 + [8] * 60):
        depth = policy.choose([odds(right=0.6, further=further)] * width, [True] * width, width=width).depth
        took = _real_cost(width, depth)
        policy.see_cost(width, depth, took * rng.lognormal(sigma=0.06), head_depth=0)
        if width == 8 and cycle >= 50:
            tokens, cost = tokens + _tokens(further, depth), cost + took
    return tokens / cost / max(_tokens(further, depth) / _real_cost(8, depth) for depth in range(deepest + 1))


def _real_cost(width: int, depth: int) -> float:
    """Of one cycle: positions are nearly free up to four, as where a forward is bound by reading the weights."""
    positions = width * (depth + 1)
    return 0.6 + 0.1 * min(positions, 4) + 0.055 * max(positions - 4, 0)


def _tokens(further: float, depth: int) -> float:
    return 1 + sum(0.6 * further**place for place in range(depth))
