"""The MTP lane over recurrent layers: joining, leaving, pausing, resuming. Runs on tiny random Qwen models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import mamba

from harness.depths import Scheduled
from harness.predicted_drafts import Foreseeing
from mtplx_core.build import build_engine
from mtplx_core.caches.row_bytes import cache_bytes
from mtplx_core.engine import Geometry, Row, SamplingParams, SchedulerMode
from mtplx_core.engines.serial import SerialEngine
from mtplx_core.errors import UnsupportedModeError
from mtplx_core.heads.base import Head
from mtplx_core.models.loader import LoadedModel
from mtplx_core.models.trunk import Trunk
from mtplx_core.mtp.assemble import deepest
from mtplx_core.mtp.depth import FixedDepth
from mtplx_core.mtp.engine import MtpBatchEngine, MtpOptions
from mtplx_core.sampling.audit import audit
from tests.mtplx_core.driving import Heard, run
from tests.mtplx_core.heads.layouts import DENSE, EXPERTS_35, NEXT, SIZE, loaded_of, tiny

GEOMETRY = Geometry(decode_batch_max=3, max_context_tokens=160, depth=7, prefill_chunk_tokens=16)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=77)
LOOPING = tuple(range(40, 48)) * 3
MIXED = (0, 2, 7, 0, 1)


@pytest.fixture(scope="module", params=[DENSE, EXPERTS_35, NEXT], ids=lambda config: config["model_type"])
def any_kind(request: pytest.FixtureRequest) -> LoadedModel:
    return loaded_of(tiny(request.param))


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return loaded_of(tiny(DENSE))


def rows_of(sampling: SamplingParams) -> list[Row]:
    prompts = [(5,), LOOPING, tuple(range(100, 171))]
    return [
        Row(f"r{index}", prompt, 26 + 6 * index, replace(sampling, seed=index), ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]


class Order:
    """Whether a cycle is built while another runs, as on a GPU, or in turn, as on a CPU."""

    overlaps = True


@pytest.fixture(autouse=True, params=[True, False], ids=["overlapped", "in-turn"])
def _order(request: pytest.FixtureRequest) -> None:
    Order.overlaps = request.param


def engine_of(loaded: LoadedModel, *depths: int, head: Head | None = None) -> MtpBatchEngine:
    policy = Scheduled(*depths) if len(depths) > 1 else FixedDepth(depths[0])
    return MtpBatchEngine(loaded, GEOMETRY, head=head, options=MtpOptions(policy=policy, overlaps=Order.overlaps))


@cache
def said_by_serial(loaded: LoadedModel, row: Row) -> list[int]:
    return run(SerialEngine(loaded, GEOMETRY), [row]).tokens[row.row_id]


def foreseeing(loaded: LoadedModel, rows: Sequence[Row]) -> Foreseeing:
    return Foreseeing(loaded.vocab_size, SIZE, [(row.prompt, said_by_serial(loaded, row)) for row in rows])


def assert_audited(loaded: LoadedModel, rows: Sequence[Row], heard: Heard) -> None:
    for row in rows:
        answer = [*row.committed, *heard.tokens[row.row_id]]
        result = audit(loaded.model, row.prompt, answer, row.sampling)
        assert result.passed, (row.row_id, result)
        assert len(answer) == row.max_tokens


@pytest.mark.parametrize(
    ("sampling", "depths"),
    [(SamplingParams(), MIXED), (SAMPLED, MIXED), (SAMPLED, (0,)), (SAMPLED, (1,))],
    ids=["greedy", "sampled", "sampled, no drafts", "sampled, one draft"],
)
def test_rows_that_accept_different_numbers_of_drafts_say_what_serial_says(
    any_kind: LoadedModel, sampling: SamplingParams, depths: tuple[int, ...]
) -> None:
    rows = rows_of(sampling)
    engine = engine_of(any_kind, *depths, head=foreseeing(any_kind, rows))

    heard = run(engine, rows)

    assert_audited(any_kind, rows, heard)
    drafted, accepted = engine.snapshot()["drafted_by_place"], engine.snapshot()["accepted_by_place"]
    assert all(0 < right < tried for right, tried in zip(accepted[:3], drafted[:3], strict=True))


def test_rows_that_join_and_leave_between_cycles_say_what_serial_says(loaded: LoadedModel) -> None:
    rows = [replace(row, row_id=f"{row.row_id}-{turn}") for turn in range(3) for row in rows_of(SAMPLED)]
    engine = engine_of(loaded, 2, 0, 3, head=foreseeing(loaded, rows_of(SAMPLED)))
    late = iter(rows[3:])

    def join(step: int) -> None:
        if engine.active_rows < 3 and step % 3 == 0 and (row := next(late, None)) is not None:
            engine.admit(row)

    heard = run(engine, rows[:3], before_step=join)

    assert_audited(loaded, rows, heard)


def test_row_continued_on_another_worker_says_what_serial_says(loaded: LoadedModel) -> None:
    (row,) = rows_of(SAMPLED)[1:2]
    first = engine_of(loaded, 2, head=foreseeing(loaded, [row]))
    first.admit(row)
    committed: list[int] = []
    while len(committed) < 15:
        committed += [token for part in first.step().tokens for token in part.tokens]
    first.close()

    resumed = replace(row, committed=tuple(committed))
    heard = run(engine_of(loaded, 1, 3), [resumed, *rows_of(SamplingParams())[::2]])

    assert heard.starts[row.row_id] == len(committed)
    assert_audited(loaded, [resumed], heard)


def test_paused_row_goes_on_where_it_was(loaded: LoadedModel) -> None:
    rows = rows_of(SAMPLED)
    engine = engine_of(loaded, 2, head=foreseeing(loaded, rows))

    def pause(step: int) -> None:
        if step == 9:
            engine.pause("r2")
        if step == 13:
            engine.resume("r2")

    heard = run(engine, rows, before_step=pause)

    assert_audited(loaded, rows, heard)


def test_row_bytes_count_the_recurrent_state(loaded: LoadedModel) -> None:
    engine = engine_of(loaded, 3)
    row = rows_of(SamplingParams())[2]
    engine.admit(row)
    most = 0
    while engine.active_rows:
        engine.step()
        most = max(most, engine.snapshot()["kv_bytes"])

    assert cache_bytes(loaded.model).fixed < most <= engine.row_bytes(len(row.prompt) + row.max_tokens)


def test_engine_frees_the_state_when_the_last_row_has_left(loaded: LoadedModel) -> None:
    engine = engine_of(loaded, 1)

    run(engine, rows_of(SamplingParams()))

    assert engine.snapshot()["kv_bytes"] == 0


def test_head_is_fed_what_the_unembedding_is_fed(loaded: LoadedModel) -> None:
    """The hidden state behind the final norm: the trunk's own logits come out of it."""
    row = Row("row", tuple(range(60, 90)), 4, ignore_eos=True)

    class Listening(Foreseeing):
        fed: list[mx.array] = []

        def __call__(
            self, hidden: mx.array, tokens: mx.array, cache: list[Any] | None = None, mask: Any = "causal"
        ) -> mx.array:
            self.fed.append(hidden)
            return super().__call__(hidden, tokens, cache, mask)

    head = Listening(loaded.vocab_size, SIZE, [(row.prompt, [0])])
    run(engine_of(loaded, 1, head=head), [row])

    model: Any = loaded.model
    prefilled = next(hidden for hidden in head.fed if hidden.shape[1] > 1)
    wanted = model(mx.array([row.prompt]))[:, : prefilled.shape[1]]
    assert mx.allclose(model.language_model.lm_head(prefilled), wanted, atol=1e-3)


def test_other_recurrent_layers_are_refused_with_the_reason() -> None:
    args = mamba.ModelArgs(
        model_type="mamba",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        state_size=4,
        num_hidden_layers=2,
        conv_kernel=4,
        use_bias=False,
        use_conv_bias=True,
        time_step_rank=2,
    )

    with pytest.raises(UnsupportedModeError, match="ArraysCache.*use ar_batch"):
        Trunk(mamba.Model(args))


@pytest.mark.parametrize("mode", list(SchedulerMode))
def test_every_mode_runs_the_family(loaded: LoadedModel, mode: SchedulerMode) -> None:
    rows = rows_of(SAMPLED)[:1]

    heard = run(build_engine(mode, loaded, geometry=GEOMETRY), rows)

    assert_audited(loaded, rows, heard)


@pytest.mark.parametrize(
    ("depth", "measured", "has_experts", "most"),
    [(3, 0, False, 3), (3, 0, True, 1), (3, 2, True, 2), (0, 0, True, 0), (1, 3, True, 1)],
)
def test_mixtures_draft_one_token_until_more_was_measured(
    depth: int, measured: int, has_experts: bool, most: int
) -> None:
    assert deepest(depth, measured, has_experts=has_experts) == most


def test_recurrent_state_of_a_first_message_is_taken_over_bit_for_bit(any_kind: LoadedModel) -> None:
    [end] = list(any_kind.eos_token_ids)[:1]
    system = (*(token for token in range(40, 55) if token != end), end)
    rows = [Row(name, (*system, *words, end, 7), 12, SAMPLED, ignore_eos=True, top_logprobs=1)
            for name, words in (("a", (11, 12)), ("b", (13,)), ("c", (14, 15, 16)))]  # fmt: skip
    engine = engine_of(any_kind, 2)

    for row in rows:
        heard, expected = run(engine, [row]), run(engine_of(any_kind, 2), [row])

        assert heard.tokens == expected.tokens
        assert heard.logprobs == expected.logprobs
    assert engine.snapshot()["shared_tokens"] == 2 * len(system)
