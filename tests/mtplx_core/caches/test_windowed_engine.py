"""The MTP lane over sliding windows: joining, drafting across the edge, pausing, continuing. Tiny random models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache

from harness.depths import Scheduled
from harness.predicted_drafts import Foreseeing
from harness.windowed import VOCAB_SIZE, WINDOW, windowed
from mtplx_core.build import build_engine
from mtplx_core.caches.row_bytes import cache_bytes
from mtplx_core.caches.windowed import in_order
from mtplx_core.engine import Geometry, Row, SamplingParams, SchedulerMode
from mtplx_core.engines.serial import SerialEngine
from mtplx_core.heads.base import Head
from mtplx_core.models.loader import LoadedModel
from mtplx_core.models.trunk import Trunk
from mtplx_core.mtp.depth import FixedDepth
from mtplx_core.mtp.engine import MtpBatchEngine, MtpOptions
from mtplx_core.mtp.prefill_batch import PrefillBatcher
from mtplx_core.sampling.audit import audit
from tests.mtplx_core.driving import Heard, run

GEOMETRY = Geometry(decode_batch_max=3, max_context_tokens=200, depth=7, prefill_chunk_tokens=16)
SAMPLED = SamplingParams(temperature=0.8, seed=77)
LOOPING = tuple(range(40, 48)) * 3
FAMILIES = {"gemma3_text": True, "gpt_oss": False, "mimo_v2_flash": True, "olmo3": False}
"""And whether a cycle is built while another runs, as on a GPU, or in turn, as on a CPU."""
BOTH_ORDERS = pytest.mark.parametrize("overlaps", [True, False], ids=["overlapped", "in-turn"])
ENDS_TURN = 2


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return windowed("gpt_oss")


def rows_of(sampling: SamplingParams) -> list[Row]:
    """All of them end some windows behind where they begin."""
    prompts = [(5,), LOOPING, tuple(range(20, 91))]
    return [
        Row(f"r{index}", prompt, 24 + 4 * index, replace(sampling, seed=index), ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]


def engine_of(loaded: LoadedModel, *depths: int, head: Head | None = None, overlaps: bool = True) -> MtpBatchEngine:
    policy = Scheduled(*depths) if len(depths) > 1 else FixedDepth(depths[0])
    return MtpBatchEngine(loaded, GEOMETRY, head=head, options=MtpOptions(policy=policy, overlaps=overlaps))


@cache
def said_by_serial(loaded: LoadedModel, row: Row) -> list[int]:
    return run(SerialEngine(loaded, GEOMETRY), [row]).tokens[row.row_id]


def foreseeing(loaded: LoadedModel, rows: Sequence[Row]) -> Foreseeing:
    hidden_size = Trunk(loaded.model).hidden_size
    return Foreseeing(VOCAB_SIZE, hidden_size, [(row.prompt, said_by_serial(loaded, row)) for row in rows])


def assert_audited(loaded: LoadedModel, rows: Sequence[Row], heard: Heard) -> None:
    for row in rows:
        answer = [*row.committed, *heard.tokens[row.row_id]]
        result = audit(loaded.model, row.prompt, answer, row.sampling)
        assert result.passed, (row.row_id, result)
        assert len(answer) == row.max_tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_drafts_accepted_and_rejected_across_the_edge_change_no_answer(family: str, sampling: SamplingParams) -> None:
    loaded, rows = windowed(family), rows_of(sampling)
    engine = engine_of(loaded, 0, 2, 7, 0, 3, head=foreseeing(loaded, rows), overlaps=FAMILIES[family])

    heard = run(engine, rows)

    assert_audited(loaded, rows, heard)
    drafted, accepted = engine.snapshot()["drafted_by_place"], engine.snapshot()["accepted_by_place"]
    assert all(0 < right < tried for right, tried in zip(accepted[:3], drafted[:3], strict=True))


def test_rows_that_join_and_leave_say_what_serial_says(loaded: LoadedModel) -> None:
    rows = [replace(row, row_id=f"{row.row_id}-{turn}") for turn in range(3) for row in rows_of(SAMPLED)]
    engine = engine_of(loaded, 2, 0, 3, head=foreseeing(loaded, rows_of(SAMPLED)))
    late = iter(rows[3:])

    def join(step: int) -> None:
        if engine.active_rows < 3 and step % 3 == 0 and (row := next(late, None)) is not None:
            engine.admit(row)

    heard = run(engine, rows[:3], before_step=join)

    assert_audited(loaded, rows, heard)


@pytest.mark.parametrize("committed", [1, 10, 21])
def test_row_continued_on_another_worker_says_what_serial_says(loaded: LoadedModel, committed: int) -> None:
    row = rows_of(SAMPLED)[1]
    first = engine_of(loaded, 2, head=foreseeing(loaded, [row]))
    first.admit(row)
    said: list[int] = []
    while len(said) < committed:
        said += [token for part in first.step().tokens for token in part.tokens]
    first.close()

    resumed = replace(row, committed=tuple(said[:committed]))
    heard = run(engine_of(loaded, 1, 3), [resumed, *rows_of(SamplingParams())[::2]])

    assert heard.starts[row.row_id] == committed
    assert_audited(loaded, [resumed], heard)


@BOTH_ORDERS
def test_rows_are_bit_equal_after_pauses_from_which_they_came_back_at_once(loaded: LoadedModel, overlaps: bool) -> None:
    """A row comes back into the slot it left, so every product has the shape and the order it would have had."""
    rows = [replace(row, top_logprobs=2) for row in rows_of(SAMPLED)]
    head = foreseeing(loaded, rows_of(SAMPLED))
    undisturbed = run(engine_of(loaded, 3, head=head, overlaps=overlaps), rows)
    engine = engine_of(loaded, 3, head=head, overlaps=overlaps)

    def pause(step: int) -> None:
        if step > 9 and step % 3 == 0 and engine.active_rows == len(rows):
            name = f"r{step % 2}"
            engine.pause(name)
            engine.resume(name)

    heard = run(engine, rows, before_step=pause)

    assert heard.tokens == undisturbed.tokens
    assert heard.logprobs == undisturbed.logprobs


@BOTH_ORDERS
def test_row_that_is_paused_for_long_goes_on_where_it_was(loaded: LoadedModel, overlaps: bool) -> None:
    rows = rows_of(SAMPLED)
    engine = engine_of(loaded, 2, head=foreseeing(loaded, rows), overlaps=overlaps)

    def pause(step: int) -> None:
        if step == 9:
            engine.pause("r2")
        if step == 14:
            engine.resume("r2")

    heard = run(engine, rows, before_step=pause)

    assert_audited(loaded, rows, heard)


def test_prompts_that_begin_alike_share_their_beginning(loaded: LoadedModel) -> None:
    first_message = (*range(30, 43), ENDS_TURN)
    rows = [
        Row(f"r{tail}", (*first_message, *range(50, 50 + tail), ENDS_TURN), 30, SAMPLED, ignore_eos=True)
        for tail in (5, 21, 40)
    ]
    engine = engine_of(loaded, 0, 2)

    heard = run(engine, rows)

    assert engine.snapshot()["shared_tokens"] == 2 * len(first_message)
    assert_audited(loaded, rows, heard)


class CountedTrunk(Trunk):
    """Counts forwards."""

    forwards = 0

    def hidden(self, tokens: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        self.forwards += 1
        return super().hidden(tokens, cache)


def test_prompts_fed_together_leave_what_each_leaves_alone(loaded: LoadedModel) -> None:
    """Their second chunks are fed together, over a ring that is gone round once more."""
    chunk, rng = 64, np.random.default_rng(3)
    rows = [Row(f"{tokens}", tuple(rng.integers(3, VOCAB_SIZE, size=tokens).tolist()), 8) for tokens in (126, 97)]
    trunk = CountedTrunk(loaded.model)
    feeder = PrefillBatcher(trunk, None, chunk_tokens=chunk, ends=())
    together, alone = [feeder.prefill_of(row) for row in rows], [feeder.prefill_of(row) for row in rows]

    for prefill in together:
        feeder.feed([prefill], most=1)
    before = trunk.forwards
    feeder.feed(together, most=2 * chunk)
    for prefill in alone:
        feeder.feed([prefill], most=2 * chunk)

    assert trunk.forwards == before + 1 + 2 * 2
    for one, other in zip(together, alone, strict=True):
        assert one.is_done
        for mine, expected in zip(one.caches, other.caches, strict=True):
            assert mine.offset == expected.offset
            for array, wanted in zip(last_of(mine), last_of(expected), strict=True):
                assert mx.allclose(array, wanted, rtol=1e-4, atol=1e-5).item()


def last_of(filled: Any) -> list[mx.array]:
    arrays = in_order(filled) if isinstance(filled, RotatingKVCache) else filled.keys_and_values()
    return [array[:, :, -WINDOW:] for array in arrays]


def test_row_takes_no_more_memory_than_is_said(loaded: LoadedModel) -> None:
    engine = engine_of(loaded, 3)
    row = rows_of(SamplingParams())[2]
    engine.admit(row)
    most = 0
    while engine.active_rows:
        engine.step()
        most = max(most, engine.snapshot()["kv_bytes"])

    assert 0 < most <= engine.row_bytes(len(row.prompt) + row.max_tokens)
    assert engine.snapshot()["kv_bytes"] == 0


def test_row_of_a_lane_grows_by_its_full_layers_alone(loaded: LoadedModel) -> None:
    engine = engine_of(loaded, 3)
    token_bytes = 2 * (2 * 2 * 12 * 4)  # two of four layers, keys and values of 2 heads of 12 floats

    grown = engine.row_bytes(40_000) - engine.row_bytes(20_000)

    assert grown <= 22_000 * token_bytes


@pytest.mark.parametrize("mode", [SchedulerMode.SERIAL, SchedulerMode.AR_BATCH])
def test_memory_of_windows_is_bounded_on_the_other_lanes_too(loaded: LoadedModel, mode: SchedulerMode) -> None:
    engine = build_engine(mode, loaded, geometry=replace(GEOMETRY, decode_batch_max=1))
    row = Row("row", tuple(range(3, 80)), 60, ignore_eos=True)
    engine.admit(row)
    most = 0
    while engine.active_rows:
        engine.step()
        most = max(most, engine.snapshot()["cache_bytes"])

    assert 0 < most <= engine.row_bytes(len(row.prompt) + row.max_tokens)


def test_windows_count_no_more_than_their_size_and_a_chunk(loaded: LoadedModel) -> None:
    measured = cache_bytes(loaded.model, chunk_tokens=16)

    # Four layers alike, two of which see all.
    assert [window.most_tokens for window in measured.windows] == [WINDOW + 16] * 2
    assert measured.per_token == 2 * measured.windows[0].per_token
    assert measured.of(100_096) == measured.per_token * 100_096 + measured.per_token * (WINDOW + 16)
