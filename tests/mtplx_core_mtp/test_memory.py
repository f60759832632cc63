"""Dividing a machine's memory between weights, buffers and rows. Runs on no engine."""

from __future__ import annotations

import pytest

from mtplx_core.memory import plan_memory, plan_this_machine

GIB = 1 << 30


@pytest.mark.parametrize(
    ("machine", "recommended", "usable"),
    [(16 * GIB, None, 0.67 * 16 * GIB), (128 * GIB, None, 96 * GIB), (128 * GIB, 80 * GIB, 80 * GIB)],
    ids=["small", "large", "recommended"],
)
def test_usable_memory_depends_on_the_machine(machine: int, recommended: int | None, usable: float) -> None:
    plan = plan_memory(machine_bytes=machine, recommended_bytes=recommended, weight_bytes=GIB)

    assert plan.usable == int(usable)
    assert 0 < plan.rows < plan.usable - GIB - plan.buffer_cache


def test_no_rows_fit_where_the_weights_fill_the_machine() -> None:
    assert plan_memory(machine_bytes=16 * GIB, recommended_bytes=None, weight_bytes=15 * GIB).rows == 0


def test_this_machine_has_room_for_rows() -> None:
    assert plan_this_machine(weight_bytes=1 << 20).rows > 0
