"""The recurrent commit against running the accepted tokens alone, row by row. Runs on one random layer, no model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import qwen3_5, qwen3_next
from mlx_lm.models.cache import ArraysCache

from mtplx_core.caches.ragged import RaggedCache, layer_shapes
from mtplx_core.caches.rebinding import rebound
from mtplx_core.caches.recurrent import RecurrentLayer, Update, listen_to, recurrent_shape
from tests.mtplx_core.heads.layouts import ATTENTION, DENSE, GATED_DELTA, NEXT, SIZE, randomise

ROWS, MOST = 3, 4


class Rig(NamedTuple):
    """One layer that is listened to, its batch, and each row's own cache beside it."""

    layer: Any
    batch: RaggedCache
    alone: list[Any]

    @property
    def recurrent(self) -> RecurrentLayer:
        return self.batch.recurrent[0]


def gated_delta_net(kind: str) -> Any:
    kinds: dict[str, Any] = {
        "qwen3_5": (qwen3_5.GatedDeltaNet, qwen3_5.TextModelArgs, {**ATTENTION, **GATED_DELTA}),
        "qwen3_next": (qwen3_next.Qwen3NextGatedDeltaNet, qwen3_next.ModelArgs, NEXT),
    }
    layer_kind, args_kind, config = kinds[kind]
    layer: Any = layer_kind(args_kind.from_dict(config))
    layer.eval()
    randomise(layer, seed=3, width=0.15)
    return layer


def rig_of(kind: str = "qwen3_5", *, rows: int = ROWS, has_kernel: bool = False) -> Rig:
    layer = gated_delta_net(kind)
    probe: Any = ArraysCache(size=2)
    layer(mx.zeros((1, 1, SIZE)), None, probe)
    listen_to([SimpleNamespace(linear_attn=layer)])
    batch = RaggedCache(layer_shapes([probe]), max_positions=MOST)
    batch.layers = [RecurrentLayer(batch, recurrent_shape(probe), has_kernel=has_kernel)]
    batch.reserve(rows, 32)
    return Rig(layer, batch, [fresh() for _ in range(rows)])


def fresh() -> Any:
    return ArraysCache(size=2)


def inputs(rng: np.random.Generator, rows: int, positions: int) -> mx.array:
    return mx.array(rng.normal(size=(rows, positions, SIZE)).astype(np.float32))


def cycle(
    rig: Rig, rng: np.random.Generator, accepted: list[int], positions: int, *, is_known: bool = False
) -> mx.array:
    """One verify step of the batch; every row's own cache is fed what the row takes of it."""
    x = inputs(rng, len(accepted), positions)
    rig.batch.begin(mx.zeros((len(accepted),), mx.int32), positions, longest=32)
    out: mx.array = rig.layer(x, None, rig.recurrent)
    rig.batch.commit(mx.array(accepted, mx.int32), known=accepted if is_known else None)
    for row, count in enumerate(accepted):
        if count:
            alone = rig.layer(x[row : row + 1, :count], None, rig.alone[row])
            assert mx.allclose(out[row : row + 1, :count], alone, atol=1e-4)
    mx.eval(rig.batch.arrays, [cache.cache for cache in rig.alone])
    return out


def window_error(rig: Rig, row: int) -> float:
    return error(rig.recurrent.window[row], rig.alone[row][0])


def state_error(rig: Rig, row: int) -> float:
    return error(rig.recurrent.state[row], rig.alone[row][1])


def error(found: mx.array, wanted: mx.array | None) -> float:
    """Relative; what was never fed is zero."""
    value: Any = mx.abs(found - (0 if wanted is None else wanted[0])).max().item()
    size: Any = 1.0 if wanted is None else mx.maximum(mx.abs(wanted).max(), 1e-3).item()
    return float(value) / float(size)


STEPS = st.lists(
    st.integers(1, MOST).flatmap(
        lambda positions: st.tuples(
            st.lists(st.integers(0, positions), min_size=ROWS, max_size=ROWS), st.just(positions), st.booleans()
        )
    ),
    min_size=1,
    max_size=10,
)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
@settings(max_examples=12, deadline=None)
@given(steps=STEPS, seed=st.integers(0, 2**32 - 1), has_kernel=st.booleans())
def test_state_is_that_of_the_accepted_tokens_alone(
    kind: str, steps: list[tuple[list[int], int, bool]], seed: int, has_kernel: bool
) -> None:
    rig, rng = rig_of(kind, has_kernel=has_kernel), np.random.default_rng(seed)

    for accepted, positions, is_known in steps:
        cycle(rig, rng, accepted, positions, is_known=is_known)

    assert max(state_error(rig, row) for row in range(ROWS)) < 1e-4


@settings(max_examples=12, deadline=None)
@given(steps=STEPS, seed=st.integers(0, 2**32 - 1), has_kernel=st.booleans())
def test_convolution_looks_back_on_the_accepted_tokens_alone(
    steps: list[tuple[list[int], int, bool]], seed: int, has_kernel: bool
) -> None:
    rig, rng = rig_of(has_kernel=has_kernel), np.random.default_rng(seed)

    for accepted, positions, is_known in steps:
        cycle(rig, rng, accepted, positions, is_known=is_known)

    assert max(window_error(rig, row) for row in range(ROWS)) < 1e-5


@pytest.mark.parametrize("has_kernel", [True, False])
def test_state_does_not_drift_while_rows_join_leave_and_accept_as_they_like(has_kernel: bool) -> None:
    rig, rng = rig_of(has_kernel=has_kernel), np.random.default_rng(5)

    for count in range(200):
        positions = int(rng.integers(1, MOST + 1))
        cycle(rig, rng, [int(taken) for taken in rng.integers(0, positions + 1, ROWS)], positions)
        if count % 20 == 7:  # a row leaves and another, prefilled at its own length, takes its slot
            slot = int(rng.integers(ROWS))
            rig.alone[slot] = fresh()
            rig.layer(inputs(rng, 1, int(rng.integers(1, 9))), None, rig.alone[slot])
            rig.batch.insert(slot, [rig.alone[slot]])
        if count % 20 == 13:  # the last row moves into a hole, and a row that was fed nothing takes its place
            rig.batch.move(ROWS - 1, 0)
            rig.alone[0], rig.alone[ROWS - 1] = rig.alone[ROWS - 1], fresh()
            rig.batch.insert(ROWS - 1, [rig.alone[ROWS - 1]])

    rig.batch.check()
    assert max(state_error(rig, row) for row in range(ROWS)) < 1e-4
    assert max(window_error(rig, row) for row in range(ROWS)) < 1e-5


def test_forward_without_a_commit_leaves_a_row_as_it_was() -> None:
    rig, rng = rig_of(), np.random.default_rng(0)
    cycle(rig, rng, [2, 2, 2], 2)
    before = [mx.array(array) for array in rig.recurrent.arrays]

    rig.batch.begin(mx.zeros((ROWS,), mx.int32), 3, longest=32)
    rig.layer(inputs(rng, ROWS, 3), None, rig.recurrent)

    assert all(mx.array_equal(*pair) for pair in zip(before, rig.recurrent.arrays, strict=True))


@pytest.mark.parametrize("has_kernel", [True, False])
def test_forward_that_was_never_committed_leaves_nothing_to_the_next(has_kernel: bool) -> None:
    rig, rng = rig_of(has_kernel=has_kernel), np.random.default_rng(0)
    rig.batch.begin(mx.zeros((ROWS,), mx.int32), 2, longest=32)
    rig.layer(inputs(rng, ROWS, 2), None, rig.recurrent)

    cycle(rig, rng, [1, 2, 3], 3)

    assert max(state_error(rig, row) for row in range(ROWS)) < 1e-5
    assert max(window_error(rig, row) for row in range(ROWS)) < 1e-5


def test_rows_that_are_known_to_take_all_get_what_the_forward_ended_in() -> None:
    rig, rng = rig_of(), np.random.default_rng(0)
    x = inputs(rng, ROWS, 2)

    rig.batch.begin(mx.zeros((ROWS,), mx.int32), 2, longest=32)
    rig.layer(x, None, rig.recurrent)
    rig.batch.commit(mx.full((ROWS,), 2, mx.int32), known=[2] * ROWS)
    for row in range(ROWS):
        rig.layer(x[row : row + 1], None, rig.alone[row])

    assert max(state_error(rig, row) for row in range(ROWS)) < 1e-5
    assert max(window_error(rig, row) for row in range(ROWS)) < 1e-5


@pytest.mark.parametrize("taken", [(4, 4, 4), (1, 4, 3), (0, 4, 2)], ids=str)
@pytest.mark.parametrize("is_known", [True, False])
def test_commit_asks_mlx_lm_for_nothing_where_what_was_written_is_kept(
    monkeypatch: pytest.MonkeyPatch, taken: tuple[int, ...], is_known: bool
) -> None:
    rig, rng = rig_of(), np.random.default_rng(0)
    rig.batch.begin(mx.zeros((ROWS,), mx.int32), MOST, longest=32)
    rig.layer(inputs(rng, ROWS, MOST), None, rig.recurrent)

    monkeypatch.setattr("mtplx_core.caches.recurrent.gated_delta_update", None)
    rig.batch.commit(mx.array(taken, mx.int32), known=taken if is_known else None)

    assert rig.recurrent.state.shape[0] == ROWS


def test_fewer_rows_than_slots_leave_the_others_alone() -> None:
    rig, rng = rig_of(rows=2), np.random.default_rng(0)
    rig.batch.reserve(4, 32)

    cycle(rig, rng, [1, 3], 3)

    assert rig.recurrent.state.shape[0] == 4
    assert not mx.any(rig.recurrent.state[2:])
    assert max(state_error(rig, row) for row in range(2)) < 1e-5


def test_lifted_row_goes_on_in_another_slot() -> None:
    rig, rng = rig_of(), np.random.default_rng(0)
    cycle(rig, rng, [3, 1, 2], 3)

    lifted = rig.batch.lift(0, 3)
    cycle(rig, rng, [0, 2, 2], 2)
    rig.batch.insert(2, lifted)
    rig.alone[2] = rig.alone[0]
    cycle(rig, rng, [0, 1, 2], 2)

    assert state_error(rig, 2) < 1e-5
    assert window_error(rig, 2) < 1e-5


def test_state_stays_float32_beside_a_bfloat16_model() -> None:
    layer = gated_delta_net("qwen3_5")
    layer.set_dtype(mx.bfloat16)
    probe: Any = fresh()
    layer(mx.zeros((1, 1, SIZE), mx.bfloat16), None, probe)
    listen_to([SimpleNamespace(linear_attn=layer)])
    batch = RaggedCache(layer_shapes([probe]), max_positions=MOST)
    batch.reserve(1, 8)

    batch.begin(mx.zeros((1,), mx.int32), 2, longest=8)
    layer(mx.ones((1, 2, SIZE), mx.bfloat16), None, batch.recurrent[0])
    batch.commit(mx.array([1], mx.int32))

    assert [array.dtype for array in batch.recurrent[0].arrays] == [mx.bfloat16, mx.float32]


def test_commit_without_a_forward_is_refused() -> None:
    rig = rig_of()

    with pytest.raises(ValueError, match="nothing was heard"):
        rig.batch.commit(mx.array([1, 1, 1], mx.int32))


def test_update_that_was_given_something_new_is_refused() -> None:
    rig = rig_of()
    arguments = dict.fromkeys(("q", "k", "v", "a", "b", "A_log", "dt_bias"), mx.zeros((1, 1)))

    with pytest.raises(TypeError, match="lower_bound"):
        rig.recurrent.hear_update(Update({**arguments, "lower_bound": -5.0}), mx.zeros((1, 1)), None)


def test_listening_changes_nothing_for_other_caches() -> None:
    quiet, heard = gated_delta_net("qwen3_5"), gated_delta_net("qwen3_5")
    listen_to([SimpleNamespace(linear_attn=heard), SimpleNamespace(linear_attn=heard), SimpleNamespace(self_attn=None)])
    x = inputs(np.random.default_rng(0), 2, 5)

    assert mx.array_equal(quiet(x), heard(x))
    assert mx.array_equal(quiet(x, None, fresh()), heard(x, None, fresh()))
    assert isinstance(heard, qwen3_5.GatedDeltaNet)


def test_layer_that_no_longer_calls_the_update_is_refused() -> None:
    def call(self: object, inputs: object) -> object:
        return inputs

    with pytest.raises(TypeError, match="does not call gated_delta_update"):
        rebound(call, {"gated_delta_update": call})


def test_row_bytes_count_the_state_before_and_after_a_cycle() -> None:
    rig = rig_of()
    window, state = 3 * 512 * 4, 2 * 128 * 128 * 4

    assert rig.batch.row_bytes(10) == rig.batch.row_bytes(10_000) == 2 * (window + state)
    assert DENSE["linear_key_head_dim"] == 128
