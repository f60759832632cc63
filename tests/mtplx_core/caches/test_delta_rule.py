"""The gated delta rule as products of matrices against mlx-lm's own update, position by position."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.gated_delta import gated_delta_update

from mtplx_core.caches.delta_rule import delta_rule

ROWS, KEY_HEADS, VALUE_HEADS, SIZE = 3, 2, 4, 32


class Fed(NamedTuple):
    """What a layer gives its update."""

    arguments: dict[str, Any]
    state: mx.array


def fed(positions: int, *, decay: float = 0.0, dtype: mx.Dtype = mx.float32) -> Fed:
    rng = np.random.default_rng(positions)

    def normal(*shape: int, width: float = 1.0, kind: mx.Dtype = dtype) -> mx.array:
        return mx.array(rng.normal(size=shape).astype(np.float32) * width).astype(kind)

    arguments = {
        "q": normal(ROWS, positions, KEY_HEADS, SIZE, width=SIZE**-1.0),
        "k": normal(ROWS, positions, KEY_HEADS, SIZE, width=SIZE**-0.5),
        "v": normal(ROWS, positions, VALUE_HEADS, SIZE),
        "a": normal(ROWS, positions, VALUE_HEADS),
        "b": normal(ROWS, positions, VALUE_HEADS),
        "A_log": normal(VALUE_HEADS, kind=mx.float32) + decay,
        "dt_bias": normal(VALUE_HEADS),
    }
    return Fed(arguments, normal(ROWS, VALUE_HEADS, SIZE, SIZE, kind=mx.float32))


def difference(found: mx.array, wanted: mx.array) -> float:
    value: Any = mx.abs(found.astype(mx.float32) - wanted.astype(mx.float32)).max().item()
    return float(value)


def with_other_neighbours(array: mx.array) -> mx.array:
    """Other numbers in all rows but row 1."""
    is_other = (mx.arange(ROWS) != 1).reshape(ROWS, *[1] * (array.ndim - 1))
    return array + 0.5 * is_other


@pytest.mark.parametrize("decay", [0.0, 6.0], ids=["slow", "to nothing"])
@pytest.mark.parametrize("positions", [1, 2, 3, 5])
def test_outputs_and_state_are_those_of_mlx_lm(positions: int, decay: float) -> None:
    arguments, state = fed(positions, decay=decay)

    outputs, written = delta_rule(**arguments, state=state)

    wanted, after = gated_delta_update(**arguments, state=state)
    assert outputs.shape == wanted.shape
    assert difference(outputs, wanted) < 1e-5
    assert difference(written.behind(state), after) < 1e-5


@pytest.mark.parametrize("decay", [0.0, 6.0], ids=["slow", "to nothing"])
@pytest.mark.parametrize("taken", [(0, 1, 4), (3, 4, 2), (4, 4, 4), (0, 0, 0)], ids=str)
def test_state_behind_some_positions_is_that_of_the_masked_update(taken: tuple[int, ...], decay: float) -> None:
    arguments, state = fed(4, decay=decay)
    counts = mx.array(taken, mx.int32)

    _, written = delta_rule(**arguments, state=state)

    _, wanted = gated_delta_update(**arguments, state=state, mask=mx.arange(4) < counts[:, None])
    assert difference(written.behind(state, counts), wanted) < 1e-5


def test_row_has_the_same_bits_whatever_the_other_rows_hold() -> None:
    arguments, state = fed(3)
    changed = {name: array if array.ndim == 1 else with_other_neighbours(array) for name, array in arguments.items()}

    outputs, written = delta_rule(**arguments, state=state)

    beside_others, written_beside = delta_rule(**changed, state=with_other_neighbours(state))
    assert mx.array_equal(beside_others[1], outputs[1])
    assert mx.array_equal(written_beside.behind(state)[1], written.behind(state)[1])
    assert difference(beside_others[0], outputs[0]) > 1e-2


def test_row_says_the_same_alone() -> None:
    arguments, state = fed(3)
    alone = {name: array if array.ndim == 1 else array[1:2] for name, array in arguments.items()}

    outputs, written = delta_rule(**arguments, state=state)

    own, own_written = delta_rule(**alone, state=state[1:2])
    assert difference(outputs[1:2], own) < 1e-5
    assert difference(written.behind(state)[1:2], own_written.behind(state[1:2])) < 1e-5


def test_state_stays_float32_beside_bfloat16_inputs() -> None:
    arguments, state = fed(2, dtype=mx.bfloat16)

    outputs, written = delta_rule(**arguments, state=state)

    wanted, after = gated_delta_update(**arguments, state=state)
    assert written.behind(state).dtype == mx.float32
    assert difference(written.behind(state), after) < 2e-2
    assert difference(outputs, wanted) < 2e-2
