"""Depth policy, cost table and acceptance odds. Pure functions; runs on no engine."""

from __future__ import annotations

import pytest

from mtplx_core.cost_table import CostTable, assumed_costs
from mtplx_core.depth import EXPLORE_EVERY, AdaptiveDepth, FixedDepth, Odds, Trial

FLAT = CostTable({(rows, depth): 1.0 + 0.01 * depth for rows in (1, 8) for depth in range(4)})
STEEP = CostTable({(rows, depth): 1.0 + depth for rows in (1, 8) for depth in range(4)})


def odds(*, right: float, further: float = 0.8) -> Odds:
    return Odds(lookup_found=0.5, lookup_right=right, lookup_further=further, head_right=right, head_further=further)


def test_policy_drafts_deep_when_drafts_are_right_and_positions_cheap() -> None:
    assert AdaptiveDepth(3, FLAT).choose([odds(right=0.8)] * 4) == 3


def test_policy_does_not_draft_when_positions_cost_more_than_they_bring() -> None:
    assert AdaptiveDepth(3, STEEP).choose([odds(right=0.8)] * 4) == 0


def test_policy_does_not_draft_when_drafts_are_wrong() -> None:
    assert AdaptiveDepth(3, FLAT).choose([odds(right=0.0)]) == 0


def test_cycle_of_first_tokens_is_as_short_as_can_be() -> None:
    policy = AdaptiveDepth(3, FLAT)

    assert [policy.choose([odds(right=0.8)] * 4, is_first=is_first) for is_first in (False, True, False)] == [3, 0, 3]
    assert FixedDepth(2).choose([odds(right=0.8)], is_first=True) == 2


def test_policy_weighs_all_rows_of_the_batch() -> None:
    costs = CostTable({(4, 0): 1.0, (4, 1): 1.5})

    assert AdaptiveDepth(1, costs).choose([odds(right=0.9)] + [odds(right=0.1)] * 3) == 0
    assert AdaptiveDepth(1, costs).choose([odds(right=0.9)] * 3 + [odds(right=0.1)]) == 1


def test_policy_goes_deeper_for_a_clear_gain_only_and_shallower_for_any() -> None:
    policy = AdaptiveDepth(1, CostTable({(1, 0): 1.0, (1, 1): 1.5}))

    chosen = [policy.choose([odds(right=right)]) for right in (0.51, 0.6, 0.51, 0.49, 0.51)]

    assert chosen == [0, 1, 1, 0, 0]


def test_policy_explores_in_less_than_a_hundredth_of_the_cycles() -> None:
    policy = AdaptiveDepth(2, STEEP)

    chosen = [policy.choose([odds(right=0.1)]) for _ in range(20 * EXPLORE_EVERY)]

    assert chosen.count(1) == 20
    assert chosen.count(0) == len(chosen) - 20
    assert 20 / len(chosen) < 0.01


def test_policy_explores_shallower_cycles_as_well() -> None:
    policy = AdaptiveDepth(1, CostTable({(1, 0): 1.0, (1, 1): 1.0}))

    chosen = [policy.choose([odds(right=0.7)]) for _ in range(4 * EXPLORE_EVERY)]

    assert chosen.count(0) == 4


def test_policy_stops_drafting_once_a_plain_cycle_turns_out_cheaper_than_assumed() -> None:
    policy = AdaptiveDepth(1, CostTable({(1, 0): 1.0, (1, 1): 1.1}))
    for _ in range(20):
        policy.see_cost(1, 1, 2.0, head_depth=1)
    before = policy.choose([odds(right=0.3)])

    policy.see_cost(1, 0, 1.0, head_depth=0)

    assert before == 1
    assert policy.choose([odds(right=0.3)]) == 0


def test_policy_returns_to_drafting_when_costs_turn_out_lower() -> None:
    policy = AdaptiveDepth(1, CostTable({(1, 0): 1.0, (1, 1): 3.0}))
    before = policy.choose([odds(right=0.7)])

    policy.see_cost(1, 0, 1.0, head_depth=0)
    policy.see_cost(1, 1, 1.1, head_depth=1)

    assert before == 0
    assert policy.choose([odds(right=0.7)]) == 1


def test_first_sighting_of_a_depth_is_held_to_what_the_others_make_expect() -> None:
    costs = CostTable({(1, 0): 1.0, (1, 1): 1.2})
    costs.see(1, 1, 12.0)

    costs.see(1, 0, 99.0)

    assert costs.cost(1, 0) == pytest.approx(13.0)


def test_fixed_depth_never_moves() -> None:
    assert FixedDepth(2).choose([odds(right=0.0)]) == 2


@pytest.mark.parametrize(
    ("trial", "field", "rises"),
    [
        (Trial(0, 0, True, True), "lookup_right", True),
        (Trial(0, 0, True, False), "lookup_right", False),
        (Trial(1, 1, False, False), "head_right", True),
        (Trial(1, 0, False, False), "head_right", False),
        (Trial(2, 2, False, False), "head_further", True),
        (Trial(2, 1, False, False), "head_further", False),
        (Trial(2, 2, True, True), "lookup_further", True),
        (Trial(2, 1, True, True), "lookup_further", False),
    ],
)
def test_odds_move_with_what_a_trial_showed(trial: Trial, field: str, rises: bool) -> None:
    row = odds(right=0.5)
    before = getattr(row, field)

    row.learn(trial)

    assert (getattr(row, field) > before) == rises
    assert getattr(row, field) != before


def test_odds_of_the_head_do_not_move_where_it_did_not_draft() -> None:
    row = odds(right=0.5)

    row.learn(Trial(0, 0, False, False))
    row.learn(Trial(1, 1, True, True))

    assert row.head_right == 0.5


def test_promised_tokens_count_the_chain_of_drafts() -> None:
    row = odds(right=0.5, further=0.5)

    by_lookup, by_head = row.promises(3)

    assert [a + b for a, b in zip(by_lookup, by_head, strict=True)] == pytest.approx([0, 0.5, 0.75, 0.875])
    assert row.promises(3, has_lookup=True)[1] == [0.0] * 4


def test_policy_drafts_deep_where_lookup_is_right_and_not_at_all_where_the_head_is_wrong() -> None:
    row = Odds(lookup_right=0.9, lookup_further=0.9, head_right=0.01)
    policy = AdaptiveDepth(3, CostTable({(1, depth): 1.0 + 0.1 * depth for depth in range(4)}))

    assert [policy.choose([row], [found]) for found in (True, False, True)] == [3, 0, 3]


def test_cycles_without_the_heads_work_have_costs_of_their_own() -> None:
    dear = CostTable({(1, depth): 1.0 + depth for depth in range(2)})
    cheap = CostTable({(1, depth): 1.0 + 0.1 * depth for depth in range(2)})
    policy = AdaptiveDepth(1, dear, cheap)

    assert policy.choose([odds(right=0.5)], [False]) == 0
    assert policy.choose([odds(right=0.5)], [True]) == 1

    for _ in range(50):
        policy.see_cost(1, 1, 3.0, head_depth=0)
        policy.see_cost(1, 0, 1.0, head_depth=0)

    assert policy.choose([odds(right=0.5)], [True]) == 0
    assert dear.entries()[1, 1] == 2.0


@pytest.mark.parametrize(
    ("head_right", "found", "head_depth"),
    [(0.5, [True, False], 1), (0.01, [True, False], 0), (0.5, [True, True], 0), (0.5, [False, False], 3)],
)
def test_head_drafts_no_further_than_pays_beside_rows_that_lookup_drafts_for(
    head_right: float, found: list[bool], head_depth: int
) -> None:
    row = Odds(lookup_right=0.95, lookup_further=0.95, head_right=head_right, head_further=0.05)
    dear = CostTable({(2, depth): 1.0 + 0.1 * depth for depth in range(4)})
    cheap = CostTable({(2, depth): 1.0 + 0.05 * depth for depth in range(4)})
    policy = AdaptiveDepth(3, dear, cheap)

    assert policy.choose([row, row], [True, False]) == 3
    assert policy.head_depth([row, row], found, 3) == head_depth


def test_cycle_in_which_the_head_drafts_a_part_tells_of_both_costs() -> None:
    dear, cheap = CostTable({(1, 0): 1.0, (1, 2): 1.4}), CostTable({(1, 0): 1.0, (1, 2): 1.0})

    AdaptiveDepth(2, dear, cheap).see_cost(1, 2, 2.4, head_depth=1)

    assert dear.cost(1, 2) == pytest.approx(2.8)
    assert cheap.cost(1, 2) == pytest.approx(2.0)


def test_cost_table_interpolates_between_widths() -> None:
    table = CostTable({(1, 0): 1.0, (4, 0): 4.0, (8, 0): 6.0})

    assert [table.cost(rows, 0) for rows in (1, 2, 4, 6, 8, 16)] == [1.0, 2.0, 4.0, 5.0, 6.0, 10.0]


def test_cost_table_goes_by_positions_where_a_depth_was_not_measured_at_other_widths() -> None:
    table = CostTable({(1, 0): 1.0, (1, 1): 1.1, (1, 3): 1.4, (16, 0): 2.6})

    assert table.cost(4, 1) == pytest.approx(1.4 + 1.2 * 4 / 12)
    assert table.cost(16, 1) == pytest.approx(2.6 + 1.2 * 16 / 12)


def test_policy_drafts_at_widths_that_the_probe_had_no_time_for() -> None:
    policy = AdaptiveDepth(3, CostTable({(1, 0): 0.13, (1, 1): 0.15, (1, 2): 0.18, (1, 3): 0.19, (16, 0): 0.31}))

    assert policy.choose([odds(right=0.6)] * 4) > 0


def test_cost_table_scales_unseen_depths_by_what_was_seen() -> None:
    table = CostTable({(1, 0): 1.0, (1, 1): 1.5})

    table.see(1, 0, 10.0)

    assert table.cost(1, 1) == 15.0


def test_cost_table_is_not_carried_away_by_a_pause() -> None:
    table = CostTable({(1, 0): 1.0})
    table.see(1, 0, 1.0)

    table.see(1, 0, 1000.0)

    assert table.cost(1, 0) == pytest.approx(1.1)


def test_assumed_costs_rise_with_rows_and_depth() -> None:
    table = assumed_costs(rows=8, depth=3)

    assert table.max_depth == 3
    assert table.cost(8, 3) > table.cost(8, 0) > table.cost(1, 0)
