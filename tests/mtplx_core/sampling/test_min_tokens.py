"""No row ends before its `min_tokens`, on every engine and by the audit. Model: tiny random llama."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from harness.models import tiny_llama
from mtplx_core.engine import Row, SamplingParams
from mtplx_core.engines.roster import end_tokens, row_end, with_end_tokens
from mtplx_core.engines.scripted import Script, ScriptedEngine, scripted_completion
from mtplx_core.errors import RowRejectedError
from mtplx_core.models.loader import LoadedModel
from mtplx_core.sampling.audit import audit
from mtplx_core.sampling.penalties import row_history
from mtplx_core.sampling.sampler import SamplingBatch
from tests.mtplx_core.driving import Heard, run
from tests.mtplx_core.engine_cases import GEOMETRY, Build

LEAST = 7
MOST = 16
SEEDED = SamplingParams(temperature=0.8, seed=21)
EVERYTHING = SamplingParams(0.8, 0.9, 40, 0.01, 1.2, 0.3, 0.2, ((5, 1.0),), 6)


def rows_of(sampling: SamplingParams) -> list[Row]:
    """Rows of which most would end at once: `ends_of` makes ends of what they say first."""
    prompts = [(10, 20, 30), (5,), tuple(range(90, 130)), tuple(range(40, 48)) * 3]
    return [Row(f"r{place}", prompt, MOST, replace(sampling, seed=place)) for place, prompt in enumerate(prompts)]


def ends_of(build: Build, rows: Sequence[Row]) -> frozenset[int]:
    """Tokens that stand near the beginning of what the rows say when nothing ends them."""
    heard = run(build("serial"), [replace(rows[0], ignore_eos=True)])
    return frozenset(heard.tokens["r0"][:3])


def check(loaded: LoadedModel, rows: Sequence[Row], heard: Heard, *, before: Sequence[int] = ()) -> None:
    """Every row passes the audit under its own bar, and ends where it has to."""
    for row in rows:
        tokens = [*before, *heard.tokens[row.row_id]]
        ends = end_tokens(row, eos_token_ids=loaded.eos_token_ids)
        sampling = with_end_tokens(row, eos_token_ids=loaded.eos_token_ids).sampling
        assert ends.isdisjoint(tokens[: row.min_tokens])
        assert ends.isdisjoint(tokens[:-1])
        assert heard.ends[row.row_id].reason == row_end(row, tokens, eos_token_ids=loaded.eos_token_ids)
        result = audit(loaded.model, row.prompt, tokens, sampling)
        assert result.passed, (row.row_id, result)


@pytest.mark.parametrize("sampling", [SamplingParams(), SEEDED], ids=["greedy", "seeded"])
def test_rows_with_and_without_min_tokens_share_a_batch(build: Build, kind: str, sampling: SamplingParams) -> None:
    rows = rows_of(sampling)
    model = tiny_llama(eos_token_ids=ends_of(build, rows))
    free, barred = rows[0], replace(rows[0], row_id="barred", min_tokens=LEAST)
    others = [replace(row, min_tokens=least) for row, least in zip(rows[1:], (1, MOST, 5), strict=True)]

    asked = [free, barred] if kind == "serial" else [free, barred, *others]
    heard = Heard()
    for part in [[row] for row in asked] if kind == "serial" else [asked]:
        each = run(build(kind, model=model), part)
        heard.tokens |= each.tokens
        heard.ends |= each.ends

    check(model, asked, heard)
    assert len(heard.tokens["r0"]) < LEAST < len(heard.tokens["barred"])


@pytest.mark.parametrize("cut", [1, LEAST + 3, LEAST + 4])
def test_resumed_row_counts_what_was_committed(build: Build, kind: str, cut: int) -> None:
    [row, *_] = rows_of(SEEDED)
    model = tiny_llama(eos_token_ids=ends_of(build, [row]))
    row = replace(row, min_tokens=LEAST + 4)
    whole = run(build(kind, model=model), [row]).tokens["r0"]

    resumed = replace(row, committed=tuple(whole[:cut]))
    heard = run(build(kind, model=model), [resumed])

    check(model, [resumed], heard, before=whole[:cut])


@pytest.mark.parametrize("kind", ["ar_batch", "mtp_batch"])
def test_paused_row_keeps_its_bar(build: Build, kind: str) -> None:
    rows = rows_of(SEEDED)[:2]
    model = tiny_llama(eos_token_ids=ends_of(build, rows))
    rows = [replace(row, min_tokens=LEAST) for row in rows]
    engine = build(kind, model=model)

    def pause(step: int) -> None:
        if step == 4:
            engine.pause("r0")
        if step == 9:
            engine.resume("r0")

    heard = run(engine, [*rows, replace(rows[1], row_id="r9", min_tokens=MOST)], before_step=pause)

    check(model, rows, heard)


def test_stop_tokens_are_barred_and_ignored_ends_are_not(build: Build, kind: str) -> None:
    row = replace(rows_of(SamplingParams())[0], ignore_eos=True)
    whole = run(build(kind), [row]).tokens["r0"]
    model = tiny_llama(eos_token_ids=frozenset({whole[0]}))
    row = replace(row, stop_token_ids=frozenset({whole[1]}), min_tokens=2)

    heard = run(build(kind, model=model), [row])

    check(model, [row], heard)
    assert heard.tokens["r0"][0] == whole[0]
    assert heard.tokens["r0"][1] != whole[1]


def test_logprobs_are_those_of_the_distribution_without_the_bar(build: Build, kind: str) -> None:
    [row, *_] = rows_of(SamplingParams())
    model = tiny_llama(eos_token_ids=ends_of(build, [row]))

    heard = run(build(kind, model=model), [replace(row, min_tokens=1, max_tokens=1, top_logprobs=1)])

    [score] = heard.logprobs["r0"]
    [(likeliest, _)] = score.top
    assert likeliest in model.eos_token_ids
    assert score.logprob < score.top[0][1]


@pytest.mark.parametrize("min_tokens", [-1, MOST + 1])
def test_row_is_refused_when_it_cannot_have_so_many_tokens(build: Build, kind: str, min_tokens: int) -> None:
    with pytest.raises(RowRejectedError, match="min_tokens"):
        build(kind).admit(replace(rows_of(SamplingParams())[0], min_tokens=min_tokens))


def test_token_ids_beyond_the_vocabulary_end_nothing(build: Build, kind: str) -> None:
    row = replace(rows_of(SamplingParams())[0], stop_token_ids=frozenset({10**6}), min_tokens=MOST)

    heard = run(build(kind), [row])

    assert len(heard.tokens["r0"]) == MOST


@pytest.mark.parametrize("sampling", [SamplingParams(), EVERYTHING], ids=["greedy", "everything"])
def test_draft_is_barred_like_the_choice_it_guesses(sampling: SamplingParams) -> None:
    barred = replace(sampling, min_tokens=3, end_token_ids=(4,))
    batch = SamplingBatch([barred, sampling], vocab_size=6)
    logits = mx.array([[0.0, 0.0, 0.0, 0.0, 50.0, 0.0]] * 2)
    ids = mx.array([5, 4, 2])
    history = [row_history((), (), vocab_size=6)] * 2

    def drafted(position: int) -> list[int]:
        starts = mx.array([position] * 2)
        chosen: Any = batch.choose_draft(logits[:, ids], starts, vocabulary=ids, history=history)
        return [int(token) for token in chosen.tolist()]

    assert drafted(2)[0] in (5, 2)
    assert drafted(2)[1] == 4
    assert drafted(3) == [4, 4]


def test_bar_is_set_by_position_within_one_step() -> None:
    batch = SamplingBatch([SamplingParams(min_tokens=3, end_token_ids=(0,)), SamplingParams()], vocab_size=3)
    logits = mx.broadcast_to(mx.array([5.0, 1.0, 0.0]), (2, 4, 3))

    chosen = batch.choose(logits, mx.array([1, 1]))

    assert chosen.tolist() == [[1, 1, 0, 0], [0, 0, 0, 0]]
    assert not batch.is_plain_greedy


def test_engines_of_the_audit_see_an_end_before_its_time() -> None:
    model = tiny_llama()
    row = replace(rows_of(SamplingParams())[0], min_tokens=4)
    sampling = with_end_tokens(row, eos_token_ids=model.eos_token_ids).sampling

    result = audit(model.model, row.prompt, [*model.eos_token_ids], sampling)

    assert not result.passed


def test_scripted_engine_puts_its_end_off_and_plays_no_stop_token() -> None:
    script = Script(vocab_size=8, eos_token_id=7, eos_position=lambda prompt: 2)
    row = Row("row", (1, 2, 3), 20, stop_token_ids=frozenset(range(5)), min_tokens=6)

    tokens = run(ScriptedEngine(GEOMETRY, script), [row]).tokens["row"]

    assert set(tokens[:6]) <= {5, 6}
    assert tokens == list(scripted_completion(row, script))
    assert len(scripted_completion(replace(row, stop_token_ids=frozenset(), min_tokens=6), script)) == 7
