"""The MTP engine sets the bar on ends by position within a verify step, whatever is drafted across it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.knowing_head import KnowingHead
from mtplx_core.engine import Geometry, Row, SamplingParams
from mtplx_core.engines.roster import with_end_tokens
from mtplx_core.engines.serial import SerialEngine
from mtplx_core.heads.base import Head
from mtplx_core.models.loader import LoadedModel
from mtplx_core.mtp.depth import FixedDepth
from mtplx_core.mtp.engine import MtpBatchEngine, MtpOptions
from mtplx_core.sampling.audit import audit
from tests.mtplx_core.driving import run

GEOMETRY = Geometry(decode_batch_max=4, max_context_tokens=200, depth=7, prefill_chunk_tokens=16)
by_order = pytest.mark.parametrize("overlaps", [True, False], ids=["overlapped", "in-turn"])
by_sampling = pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(0.8, seed=9)], ids=["greedy", "seeded"]
)


def rows_of(sampling: SamplingParams) -> list[Row]:
    """Repetitions, so that lookup drafts; the bars end at different places of a verify step."""
    prompt = tuple(range(40, 48)) * 3
    return [
        Row(
            f"r{place}",
            (*prompt, *range(50 + 10 * place, 51 + 11 * place)),
            40,
            replace(sampling, seed=place),
            min_tokens=least,
        )
        for place, least in enumerate((0, 7, 18, 40))
    ]


def engine_of(loaded: LoadedModel, depth: int, *, overlaps: bool, head: Head | None = None) -> MtpBatchEngine:
    options = MtpOptions(policy=FixedDepth(depth), overlaps=overlaps)
    return MtpBatchEngine(loaded, replace(GEOMETRY, depth=depth), head=head, options=options)


def with_many_ends(loaded: LoadedModel) -> LoadedModel:
    """A model for which every third token is an end."""
    return replace(loaded, eos_token_ids=frozenset(range(0, loaded.vocab_size, 3)))


@by_order
@by_sampling
@pytest.mark.parametrize("depth", [1, 7])
def test_rows_are_barred_by_position_when_lookup_drafts(
    loaded: LoadedModel, depth: int, sampling: SamplingParams, overlaps: bool
) -> None:
    model = with_many_ends(loaded)

    heard = run(engine_of(model, depth, overlaps=overlaps), rows_of(sampling))

    for row in rows_of(sampling):
        tokens = heard.tokens[row.row_id]
        ends = model.eos_token_ids
        barred = with_end_tokens(row, eos_token_ids=ends).sampling
        assert ends.isdisjoint(tokens[: row.min_tokens])
        assert ends.isdisjoint(tokens[:-1])
        assert (tokens[-1] in ends) == (heard.ends[row.row_id].reason == "stop")
        assert audit(model.model, row.prompt, tokens, barred).passed, row.row_id
    assert len(heard.tokens["r0"]) < 7


@by_order
def test_right_drafts_across_the_bound_are_accepted_under_the_bar(loaded: LoadedModel, overlaps: bool) -> None:
    """The head repeats what serial said: all of it must be taken, before the bound, across it and up to the end."""
    model = with_many_ends(loaded)
    rows = rows_of(SamplingParams())[1:3]
    answers = [run(SerialEngine(model, GEOMETRY), [row]) for row in rows]
    told = [(row.prompt, [*answer.tokens[row.row_id]]) for row, answer in zip(rows, answers, strict=True)]

    engine = engine_of(model, 3, overlaps=overlaps, head=KnowingHead(model, told))
    heard = run(engine, rows)

    for row, answer in zip(rows, answers, strict=True):
        assert heard.tokens[row.row_id] == answer.tokens[row.row_id]
        assert heard.ends[row.row_id].reason == answer.ends[row.row_id].reason
    drafted = engine.snapshot()["drafters"]["head"]
    assert drafted["tried"] == drafted["right"] > 5
