"""What a cycle is taken to cost, and how sightings change it. Pure functions; runs on no engine."""

from __future__ import annotations

import numpy as np
import pytest

from mtplx_core.mtp.cost_table import CostTable, assumed_costs


def test_cost_table_interpolates_between_widths() -> None:
    table = CostTable({(1, 0): 1.0, (4, 0): 4.0, (8, 0): 6.0})

    assert [table.cost(rows, 0) for rows in (1, 2, 4, 6, 8, 16)] == [1.0, 2.0, 4.0, 5.0, 6.0, 10.0]


def test_cost_table_goes_by_positions_where_a_depth_was_not_measured_at_other_widths() -> None:
    table = CostTable({(1, 0): 1.0, (1, 1): 1.1, (1, 3): 1.4, (16, 0): 2.6})

    assert table.cost(4, 1) == pytest.approx(1.4 + 1.2 * 4 / 12)
    assert table.cost(16, 1) == pytest.approx(2.6 + 1.2 * 16 / 12)


def test_cost_table_scales_unseen_depths_by_what_was_seen() -> None:
    table = CostTable({(1, 0): 1.0, (1, 1): 1.5})

    table.see(1, 0, 10.0)

    assert table.cost(1, 1) == 15.0


def test_cost_table_takes_a_slower_machine_to_be_slower_at_every_depth_and_width() -> None:
    table = CostTable({(1, 0): 1.0, (1, 1): 1.2, (4, 0): 1.5})
    for rows, depth, cost in ((1, 0, 1.0), (4, 0, 1.5), (1, 1, 1.2)):
        for _ in range(20):
            table.see(rows, depth, cost)

    for _ in range(40):
        table.see(1, 1, 2.4)

    assert table.cost(1, 1) == pytest.approx(2.4, rel=0.02)
    assert 1.15 < table.cost(1, 0) < 1.3
    assert table.cost(4, 0) == pytest.approx(1.5 * table.cost(1, 0))


def test_cost_table_lets_no_cycle_be_cheaper_than_a_shallower_one() -> None:
    table = CostTable({(1, 0): 1.0, (1, 1): 1.2, (1, 2): 1.4})
    for depth, cost in ((0, 1.0), (1, 1.8)):
        for _ in range(20):
            table.see(1, depth, cost)
    for _ in range(3):
        table.see(1, 2, 1.4)

    assert 1.0 < table.cost(1, 0) < table.cost(1, 1) <= table.cost(1, 2) < 1.8


def test_cost_table_is_not_carried_away_by_a_pause() -> None:
    table = CostTable({(1, 0): 1.0})
    for _ in range(20):
        table.see(1, 0, 1.0)

    table.see(1, 0, 1000.0)

    assert table.cost(1, 0) == pytest.approx(2.0**0.1)


def test_cost_table_takes_no_cycle_to_be_free() -> None:
    table = CostTable({(1, 0): 1.0, (1, 1): 1.2})
    for depth in (0, 1):
        for _ in range(3):
            table.see(1, depth, 0.0)

    assert (table.cost(1, 0), table.cost(1, 1)) == (1.0, 1.2)


@pytest.mark.parametrize("deeper", [1.2, 0.9], ids=["dearer", "cheaper than a shallower one"])
def test_costs_that_are_not_seen_for_long_do_not_drift_away(deeper: float) -> None:
    rng = np.random.default_rng(3)
    table = CostTable({(1, 0): 1.0, (1, 1): 1.2, (8, 0): 2.0, (8, 1): 2.4})
    for _ in range(20):
        table.see(1, 0, 1.0)

    for cost in rng.lognormal(sigma=0.2, size=20_000):
        table.see(8, 0, 2.0 * cost)
        table.see(8, 1, 2.0 * deeper * cost)

    assert table.cost(1, 0) == pytest.approx(1.0, rel=0.2)
    assert table.cost(8, 1) == pytest.approx(2.0 * max(deeper, 0.95), rel=0.2)


def test_early_sightings_move_a_cost_faster_than_later_ones() -> None:
    table = CostTable({(1, 0): 1.0, (1, 1): 4.0})
    table.see(1, 0, 1.0)

    costs = []
    for seen in (9.0, 2.0, 2.0, 2.0):
        table.see(1, 1, seen)
        costs.append(table.cost(1, 1))

    second = (5.2 * 2.0) ** (1 / 2)
    third = second ** (2 / 3) * 2.0 ** (1 / 3)
    assert costs == pytest.approx([5.2, second, third, third ** (3 / 4) * 2.0 ** (1 / 4)])


def test_assumed_costs_rise_with_rows_and_depth() -> None:
    table = assumed_costs(rows=8, depth=3)

    assert table.cost(8, 3) > table.cost(8, 0) > table.cost(1, 0)
