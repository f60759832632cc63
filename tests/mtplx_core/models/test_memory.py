"""Dividing a machine's memory between weights, buffers and rows. Runs on none or a tiny llama."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.llama import Model, ModelArgs

from harness.models import CONFIG, tiny_llama
from mtplx_core.build import build_engine
from mtplx_core.engine import Geometry, Row, SamplingParams, SchedulerMode
from mtplx_core.errors import UnsupportedModeError
from mtplx_core.models.memory import fit_geometry, plan_memory, plan_this_machine
from mtplx_core.mtp.depth import FixedDepth
from mtplx_core.mtp.engine import MtpBatchEngine, MtpOptions

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


def fitted(memory_bytes: int) -> tuple[int, int]:
    geometry = fit_geometry(Geometry(8, 1024), memory_bytes=memory_bytes, row_bytes=lambda tokens: 10 * tokens)
    return geometry.decode_batch_max, geometry.max_context_tokens


def test_lane_keeps_its_rows_where_memory_is_plenty() -> None:
    assert fitted(200_000) == (8, 1024)


def test_lane_has_fewer_rows_where_memory_is_short() -> None:
    assert fitted(5 * 10_240) == (4, 1024)


def test_lane_has_one_shorter_row_where_memory_is_very_short() -> None:
    assert fitted(15_000) == (1, 512)


def test_lane_that_cannot_hold_a_row_is_refused_with_the_figures() -> None:
    with pytest.raises(UnsupportedModeError, match="256 tokens takes 2560 bytes twice, 5000 are left"):
        fitted(5000)


@pytest.mark.parametrize("mode", [SchedulerMode.AR_BATCH, SchedulerMode.MTP_BATCH])
def test_engine_is_narrowed_to_the_memory_it_is_given(mode: SchedulerMode) -> None:
    loaded, geometry = tiny_llama(), Geometry(8, 512, depth=1)
    whole = build_engine(mode, loaded, geometry=geometry)
    memory_bytes = 4 * whole.row_bytes(512)

    engine = build_engine(mode, loaded, geometry=geometry, memory_bytes=memory_bytes)

    assert engine.geometry.decode_batch_max == 3
    assert engine.geometry.decode_batch_max * engine.row_bytes(512) <= memory_bytes


def test_rows_carry_what_a_deep_cycle_makes_of_a_large_vocabulary() -> None:
    config = {**CONFIG, "vocab_size": 50_000, "num_hidden_layers": 1}
    model: Any = Model(ModelArgs.from_dict(config))  # type: ignore[no-untyped-call]  # mlx-lm annotates in part
    loaded = replace(tiny_llama(), model=model, vocab_size=50_000)
    geometry = Geometry(4, 128, depth=7)
    engine = MtpBatchEngine(loaded, geometry, options=MtpOptions(policy=FixedDepth(7)))
    sampling = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, frequency_penalty=0.2)
    for name in "abcd":
        engine.admit(Row(name, (5, 6, 7), 100, sampling, ignore_eos=True, top_logprobs=5))
    while engine.snapshot()["cycles"] < 2:
        engine.step()

    without_rows = mx.get_active_memory() - engine.snapshot()["kv_bytes"]
    mx.reset_peak_memory()
    engine.step()

    assert mx.get_peak_memory() - without_rows <= 4 * engine.row_bytes(128)
