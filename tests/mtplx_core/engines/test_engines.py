"""What every engine promises, on every engine: serial, ar_batch, b1-exact, mtp_batch. Model: tiny random llama."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.models import tiny_llama
from mtplx_core.engine import Row, StepResult
from mtplx_core.models.loader import LoadedModel
from mtplx_core.sampling.audit import audit, compare
from tests.mtplx_core.driving import assert_decided, run
from tests.mtplx_core.engine_cases import BATCHED, KINDS, NEIGHBOURS, ROWS, SAMPLED, Build

CHUNKED = [kind for kind in KINDS if kind != "b1_exact"]
"""Engines that split a prompt by the geometry; b1-exact splits it where mlx-lm does."""

ROW_CASES = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())


@ROW_CASES
def test_engine_takes_the_samplers_token_at_every_position(
    build: Build, loaded: LoadedModel, kind: str, row: Row
) -> None:
    output = run(build(kind), [row]).tokens["row"]

    result = audit(loaded.model, row.prompt, output, row.sampling)

    assert result.passed, result
    assert result.positions > 0


@ROW_CASES
@pytest.mark.parametrize("kind", BATCHED)
def test_row_gets_the_serial_answer_among_neighbours(build: Build, loaded: LoadedModel, kind: str, row: Row) -> None:
    alone = run(build("serial"), [row]).tokens["row"]

    heard = run(build(kind), [*NEIGHBOURS[:2], row, *NEIGHBOURS[2:]])

    assert compare(loaded.model, row.prompt, alone, heard.tokens["row"], row.sampling).passed
    assert len(heard.ends) == 5


@pytest.mark.parametrize("kind", BATCHED)
def test_all_neighbours_pass_the_audit_while_rows_join_and_leave(build: Build, loaded: LoadedModel, kind: str) -> None:
    engine = build(kind)
    late = {4: NEIGHBOURS[1], 7: NEIGHBOURS[2], 19: NEIGHBOURS[3]}

    def join(step: int) -> None:
        if step in late:
            engine.admit(late[step])

    heard = run(engine, [ROWS["sampled"], NEIGHBOURS[0]], before_step=join)

    assert heard.ends.keys() == {"row", "n0", "n1", "n2", "n3"}
    for row in [ROWS["sampled"], *NEIGHBOURS]:
        result = audit(loaded.model, row.prompt, heard.tokens[row.row_id], row.sampling)
        assert result.passed, (row.row_id, result)


@pytest.mark.parametrize("cut", [1, 11, 23])
def test_resumed_row_goes_on_as_if_nothing_had_happened(build: Build, loaded: LoadedModel, kind: str, cut: int) -> None:
    row = ROWS["penalties"]
    whole = run(build(kind), [row]).tokens["row"]

    heard = run(build(kind), [replace(row, committed=tuple(whole[:cut]))])

    resumed = whole[:cut] + heard.tokens["row"]
    assert heard.starts["row"] == cut
    assert audit(loaded.model, row.prompt, resumed, row.sampling).passed
    assert compare(loaded.model, row.prompt, whole, resumed, row.sampling).passed


def test_row_that_had_committed_everything_ends_without_a_token(build: Build, kind: str) -> None:
    heard = run(build(kind), [Row("row", (1, 5), 3, committed=(7, 8, 9))])

    assert heard.ends["row"].reason == "length"
    assert not heard.tokens["row"]


def test_row_that_had_committed_its_stop_ends_without_a_token(build: Build, kind: str) -> None:
    heard = run(build(kind), [Row("row", (1, 5), 30, committed=(7, 8), stop_token_ids=frozenset({8}))])

    assert heard.ends["row"].reason == "stop"
    assert not heard.tokens["row"]


def test_row_ends_with_length_at_max_tokens(build: Build, kind: str) -> None:
    heard = run(build(kind), [Row("row", (10, 20, 30), 5, ignore_eos=True)])

    assert len(heard.tokens["row"]) == 5
    assert heard.ends["row"].reason == "length"


def test_row_ends_at_a_stop_token_and_hands_it_out(build: Build, loaded: LoadedModel, kind: str) -> None:
    row = ROWS["greedy"]
    whole = run(build(kind), [row]).tokens["row"]
    assert_decided(loaded, row, whole)
    stop = whole[6]

    heard = run(build(kind), [replace(row, stop_token_ids=frozenset({stop}))])

    assert heard.tokens["row"] == whole[: whole.index(stop) + 1]
    assert heard.ends["row"].reason == "stop"


def test_row_ends_at_end_of_sequence_unless_told_to_ignore_it(build: Build, loaded: LoadedModel, kind: str) -> None:
    row = ROWS["greedy"]
    whole = run(build(kind), [row]).tokens["row"]
    assert_decided(loaded, row, whole)
    model = tiny_llama(eos_token_ids=frozenset({whole[3]}))

    ended = run(build(kind, model=model), [replace(row, ignore_eos=False)])
    ignored = run(build(kind, model=model), [row])

    assert ended.tokens["row"] == whole[: whole.index(whole[3]) + 1]
    assert ended.ends["row"].reason == "stop"
    assert len(ignored.tokens["row"]) == 24


def test_logprobs_are_those_of_the_raw_logits(build: Build, kind: str) -> None:
    row = replace(ROWS["penalties"], top_logprobs=3)

    heard = run(build(kind), [row])

    logprobs = heard.logprobs["row"]
    assert len(logprobs) == len(heard.tokens["row"])
    assert all(len(entry.top) == 3 for entry in logprobs)
    assert all(a >= b for entry in logprobs for (_, a), (_, b) in zip(entry.top, entry.top[1:], strict=False))
    assert all(entry.logprob <= entry.top[0][1] <= 0 for entry in logprobs)


@pytest.mark.parametrize("kind", BATCHED)
def test_each_row_gets_as_many_logprobs_as_it_asked_for(build: Build, kind: str) -> None:
    rows = [replace(NEIGHBOURS[0], top_logprobs=0), replace(NEIGHBOURS[1], top_logprobs=5), NEIGHBOURS[2]]

    heard = run(build(kind), rows)

    assert {len(entry.top) for entry in heard.logprobs["n0"]} == {0}
    assert {len(entry.top) for entry in heard.logprobs["n1"]} == {5}
    assert not heard.logprobs["n2"]


@pytest.mark.parametrize("kind", CHUNKED)
def test_prefill_is_reported_chunk_by_chunk(build: Build, kind: str) -> None:
    heard = run(build(kind), [Row("row", tuple(range(4, 54)), 2)])

    done = [progress.done for progress in heard.prefill]
    assert len(done) >= 3
    assert done == sorted(set(done))
    assert done[-1] == heard.prefill[-1].total


@pytest.mark.parametrize("kind", [kind for kind in CHUNKED if kind != "serial"])
def test_running_row_keeps_moving_while_a_long_prompt_is_fed(build: Build, kind: str) -> None:
    engine = build(kind)
    engine.admit(replace(ROWS["greedy"], max_tokens=100))
    while not engine.step().tokens:
        pass
    engine.admit(Row("long", tuple(range(4, 204)), 4))

    moved = fed = 0
    for _ in range(8):
        result = engine.step()
        fed += bool(result.prefill)
        moved += any(part.row_id == "row" for part in result.tokens)

    assert fed == 8
    assert moved >= 7


def test_discarded_row_is_heard_of_no_more(build: Build, kind: str) -> None:
    engine = build(kind)

    def leave(step: int) -> None:
        if step == 6:
            engine.discard("row")
            assert engine.active_rows == 0

    heard = run(engine, [replace(ROWS["greedy"], max_tokens=60)], before_step=leave)

    assert not heard.ends
    assert heard.steps == 6


@pytest.mark.parametrize("after_steps", range(6))
@pytest.mark.parametrize("kind", BATCHED)
def test_neighbours_of_a_discarded_row_keep_their_answers(
    build: Build, loaded: LoadedModel, kind: str, after_steps: int
) -> None:
    engine = build(kind)

    def leave(step: int) -> None:
        if step == after_steps:
            engine.discard("n1")

    heard = run(engine, [NEIGHBOURS[1], ROWS["sampled"], NEIGHBOURS[0]], before_step=leave)

    assert heard.ends.keys() == {"row", "n0"}
    for row in (ROWS["sampled"], NEIGHBOURS[0]):
        assert audit(loaded.model, row.prompt, heard.tokens[row.row_id], row.sampling).passed


def test_row_id_may_be_used_again_after_a_discard(build: Build, loaded: LoadedModel, kind: str) -> None:
    engine = build(kind)
    engine.admit(NEIGHBOURS[3])
    for _ in range(4):
        engine.step()
    engine.discard("n3")

    heard = run(engine, [replace(ROWS["sampled"], row_id="n3")])

    assert audit(loaded.model, ROWS["sampled"].prompt, heard.tokens["n3"], SAMPLED).passed


def test_discarding_an_unknown_row_does_nothing(build: Build, kind: str) -> None:
    build(kind).discard("nobody")


def test_step_returns_at_once_when_nothing_is_active(build: Build, kind: str) -> None:
    result = build(kind).step()

    assert result == StepResult()
