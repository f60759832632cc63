"""The sampler against a plain NumPy one, its law by chi-square, rows that must not touch each other. Engine: none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from mtplx_core.engine import SamplingParams
from mtplx_core.sampling.penalties import RowHistory, row_history
from mtplx_core.sampling.sampler import SamplingBatch
from tests.mtplx_core.sampling.reference_sampler import filtered, penalised, reference_scores

VOCAB = 300
PROMPT = (3, 3, 17, 200)
GENERATED = (5, 5, 5, 17, 90)
RNG = np.random.default_rng(42)
LOGITS = (RNG.normal(size=(1, 6, VOCAB)) * 3).astype(np.float32)

SAMPLINGS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.7, seed=9),
    "seed beyond 32 bits": SamplingParams(temperature=1.0, seed=2**63 + 12345),
    "top_p": SamplingParams(temperature=1.0, top_p=0.6, seed=1),
    "tiny top_p": SamplingParams(temperature=1.0, top_p=1e-9, seed=1),
    "top_k": SamplingParams(temperature=1.3, top_k=5, seed=2),
    "top_k beyond the vocabulary": SamplingParams(temperature=1.0, top_k=VOCAB + 1, seed=2),
    "min_p": SamplingParams(temperature=2.0, min_p=0.2, seed=3),
    "repetition": SamplingParams(repetition_penalty=1.8),
    "frequency": SamplingParams(temperature=0.5, frequency_penalty=1.5, seed=4),
    "presence": SamplingParams(temperature=0.5, presence_penalty=-1.5, seed=4),
    "bias": SamplingParams(temperature=0.5, logit_bias=((7, 9.0), (8, -100.0)), seed=5),
    "all": SamplingParams(0.9, 0.8, 40, 0.01, 1.2, 0.3, 0.2, ((1, 2.0),), 6),
}
SAMPLING_CASES = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())


def history() -> RowHistory:
    return row_history(PROMPT, GENERATED, vocab_size=VOCAB)


def scores_of(
    sampling: SamplingParams, logits: npt.ArrayLike, *, position: int = 0, past: RowHistory | None = None
) -> list[float]:
    row = mx.array(np.asarray(logits, np.float32))
    batch = SamplingBatch([sampling], vocab_size=row.size)
    scores = batch.scores(row.reshape(1, 1, -1), mx.array([position]), history=[past])
    return np.array(scores[0, 0]).tolist()  # type: ignore[no-any-return]  # numpy types tolist as Any


def kept(sampling: SamplingParams, logits: npt.ArrayLike) -> list[int]:
    return [token for token, score in enumerate(scores_of(sampling, logits)) if score > -np.inf]


@SAMPLING_CASES
def test_sampler_scores_tokens_as_the_plain_one_does(sampling: SamplingParams) -> None:
    batch = SamplingBatch([sampling], vocab_size=VOCAB)

    scores = np.array(batch.scores(mx.array(LOGITS), mx.array([10]), history=[history()]))

    for index in range(LOGITS.shape[1]):
        expected = reference_scores(LOGITS[0, index], sampling, position=10 + index, prompt=PROMPT, generated=GENERATED)
        np.testing.assert_allclose(scores[0, index], expected, rtol=1e-4, atol=1e-4)


@SAMPLING_CASES
@pytest.mark.parametrize("place", [0, 4, len(SAMPLINGS)])
def test_row_is_bit_equal_alone_and_among_all_others(sampling: SamplingParams, place: int) -> None:
    logits, others = mx.array(LOGITS), list(SAMPLINGS.values())
    everyone = [*others[:place], sampling, *others[place:]]
    alone = SamplingBatch([sampling], vocab_size=VOCAB)
    among = SamplingBatch(everyone, vocab_size=VOCAB)
    noise = mx.random.normal(logits.shape, key=mx.random.key(1))
    crowd = mx.concatenate([logits if row == place else noise for row in range(len(everyone))])
    starts = mx.array([4 if row == place else row for row in range(len(everyone))])

    alone_scores = alone.scores(logits, mx.array([4]), history=[history()])
    among_scores = among.scores(crowd, starts, history=[history()] * len(everyone))

    assert bool(mx.array_equal(among_scores[place], alone_scores[0]))


@SAMPLING_CASES
def test_drafts_count_as_if_they_were_committed(sampling: SamplingParams) -> None:
    drafts = (17, 5, 250, 5, 5)
    batch = SamplingBatch([sampling], vocab_size=VOCAB)
    logits = mx.array(LOGITS)

    together = batch.choose(logits, mx.array([2]), history=[history()], drafts=mx.array([drafts]))

    for index in range(logits.shape[1]):
        past = history().append(drafts[:index])
        one = batch.choose(logits[:, index : index + 1], mx.array([2 + index]), history=[past])
        assert one.item() == together[0, index].item()


@SAMPLING_CASES
def test_noise_made_ahead_changes_nothing(sampling: SamplingParams) -> None:
    batch = SamplingBatch([sampling, SamplingParams()], vocab_size=VOCAB)
    logits = mx.concatenate([mx.array(LOGITS)] * 2)
    starts = mx.array([3, 4])
    past = [history(), None]

    ahead = batch.choose(logits, starts, history=past, noise=batch.noise(starts, positions=logits.shape[1]))

    assert ahead.tolist() == batch.choose(logits, starts, history=past).tolist()


@pytest.mark.parametrize("top_k", [1, 20, 256, 257])
@pytest.mark.parametrize("top_p", [0.6, 1.0])
def test_sampler_takes_the_best_score_of_a_large_vocabulary(top_k: int, top_p: float) -> None:
    rows = [SamplingParams(temperature=1.5, top_k=top_k, top_p=top_p, min_p=0.001, seed=seed) for seed in range(4)]
    batch = SamplingBatch(rows, vocab_size=3000)
    logits = mx.array(RNG.normal(size=(4, 25, 3000)).astype(np.float32))
    starts = mx.arange(4)

    tokens = batch.choose(logits, starts)

    assert tokens.tolist() == mx.argmax(batch.scores(logits, starts), axis=-1).tolist()


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 5}, {"top_p": 0.4}, {"min_p": 0.3}], ids=["unfiltered", "top_k", "top_p", "min_p"]
)
def test_draft_is_the_targets_own_token_when_head_and_trunk_agree(filters: dict[str, Any]) -> None:
    rows = [SamplingParams(temperature=1.5, frequency_penalty=0.7, seed=n, **filters) for n in range(8)] + [
        SamplingParams()
    ]
    batch = SamplingBatch(rows, vocab_size=VOCAB)
    past = [history()] * 8 + [None]
    logits = mx.array(RNG.normal(size=(9, VOCAB)).astype(np.float32))
    starts = mx.arange(9)
    drafts = mx.full((9, 1), 5)

    draft = batch.choose_draft(logits, starts, history=past, drafts=drafts)

    past_draft = [row.append([5]) if row else None for row in past]
    assert draft.tolist() == batch.choose(logits[:, None], starts, history=past_draft)[:, 0].tolist()


def test_draft_over_a_whole_large_vocabulary_goes_through_the_cheap_filter_alone() -> None:
    size = 20_000
    logits = mx.array(RNG.normal(size=(1, size)).astype(np.float32))
    with_all = SamplingBatch([SamplingParams(temperature=2.0, min_p=0.2, top_k=2, top_p=0.1, seed=4)], vocab_size=size)
    with_min_p = SamplingBatch([SamplingParams(temperature=2.0, min_p=0.2, seed=4)], vocab_size=size)

    drafts = [batch.choose_draft(logits, mx.array([3])).tolist() for batch in (with_all, with_min_p)]

    assert drafts[0] == drafts[1]
    assert drafts[1] == with_min_p.choose(logits[:, None], mx.array([3]))[:, 0].tolist()


def test_draft_from_a_smaller_vocabulary_is_the_best_of_its_tokens() -> None:
    vocabulary = mx.array([250, 3, 5, 7, 100])
    rows = [SamplingParams(temperature=0.8, seed=1, presence_penalty=0.5, logit_bias=((7, 1.0),)), SamplingParams()]
    batch = SamplingBatch(rows, vocab_size=VOCAB)
    logits = mx.array(np.concatenate([LOGITS[:, 0]] * 2))
    past = [history(), None]

    draft = batch.choose_draft(logits[:, vocabulary], mx.array([6, 6]), vocabulary=vocabulary, history=past)

    scores = batch.scores(logits[:, None], mx.array([6, 6]), history=past)[:, 0, vocabulary]
    assert draft.tolist() == vocabulary[mx.argmax(scores, axis=-1)].tolist()


def test_half_precision_logits_are_scored_in_float32() -> None:
    batch = SamplingBatch([SamplingParams(temperature=0.9, seed=3)], vocab_size=VOCAB)
    logits = mx.array(LOGITS).astype(mx.bfloat16)

    scores = batch.scores(logits, mx.array([0]))

    assert scores.dtype == mx.float32
    assert bool(mx.array_equal(scores, batch.scores(logits.astype(mx.float32), mx.array([0]))))


def test_temperature_comes_before_min_p() -> None:
    logits = np.log([0.5, 0.3, 0.2])

    assert kept(SamplingParams(temperature=1.0, min_p=0.7), logits) == [0]
    assert kept(SamplingParams(temperature=3.0, min_p=0.7), logits) == [0, 1, 2]


def test_min_p_comes_before_top_p() -> None:
    logits = np.log([0.4, 0.3, 0.15, 0.15])

    assert kept(SamplingParams(temperature=1.0, top_p=0.75), logits) == [0, 1, 2, 3]
    assert kept(SamplingParams(temperature=1.0, top_p=0.75, min_p=0.5), logits) == [0, 1]


def test_top_k_comes_before_top_p() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1])

    assert kept(SamplingParams(temperature=1.0, top_p=0.6), logits) == [0, 1]
    assert kept(SamplingParams(temperature=1.0, top_p=0.55, top_k=2), logits) == [0]


def test_penalties_come_before_temperature() -> None:
    past = row_history((), (0,), vocab_size=2)
    sampling = SamplingParams(temperature=0.5, presence_penalty=1.0, seed=8)

    plain, other = (
        scores_of(replace(sampling, presence_penalty=0.0), [4.0, 0.0]),
        scores_of(sampling, [4.0, 0.0], past=past),
    )

    assert plain[0] - other[0] == pytest.approx(2.0, abs=1e-5)


def test_repetition_comes_after_bias_and_before_frequency() -> None:
    past = row_history((), (0, 0), vocab_size=1)
    sampling = SamplingParams(
        repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, logit_bias=((0, 3.0),)
    )

    assert scores_of(sampling, [1.0], past=past) == [(1.0 + 3.0) / 2.0 - 2 * 0.5 - 0.25]


def test_repetition_pushes_negative_logits_further_down() -> None:
    assert scores_of(SamplingParams(repetition_penalty=2.0), [-1.0], past=row_history((0,), (), vocab_size=1)) == [-2.0]


def test_frequency_and_presence_do_not_count_the_prompt() -> None:
    past = row_history((0, 0), (), vocab_size=1)

    assert scores_of(SamplingParams(frequency_penalty=1.0, presence_penalty=1.0), [1.0], past=past) == [1.0]


def test_equal_tokens_at_the_edge_of_the_nucleus_stay_together() -> None:
    assert kept(SamplingParams(temperature=1.0, top_p=0.5), np.log([0.4, 0.2, 0.2, 0.2])) == [0, 1, 2, 3]


@pytest.mark.parametrize("vocab", [2047, 4096, 5001, 49152])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95, 0.9999])
def test_nucleus_of_a_large_vocabulary_is_that_of_a_full_sort(vocab: int, top_p: float) -> None:
    logits = (np.random.default_rng(vocab).normal(size=vocab) * 2).astype(np.float32)

    tokens = kept(SamplingParams(temperature=1.0, top_p=top_p), logits)

    weights = np.exp(np.sort(logits)[::-1].astype(np.float64))
    before = np.cumsum(weights) - weights
    count = int((before < top_p * weights.sum()).sum())
    # Float32 sums may move the edge by a token whose share is below their rounding.
    assert abs(len(tokens) - count) <= max(1, count // 1000)
    assert sorted(tokens) == sorted(np.argsort(-logits)[: len(tokens)].tolist())


LAWS = {
    "temperature": SamplingParams(temperature=0.8, seed=101),
    "top_k": SamplingParams(temperature=1.0, top_k=6, seed=102),
    "top_p": SamplingParams(temperature=1.0, top_p=0.7, seed=103),
    "min_p": SamplingParams(temperature=1.2, min_p=0.15, seed=104),
    "penalties": SamplingParams(temperature=1.0, frequency_penalty=0.4, repetition_penalty=1.3, seed=105),
}


@pytest.mark.parametrize("sampling", LAWS.values(), ids=LAWS.keys())
@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_sampler_draws_from_its_law(sampling: SamplingParams, along: str) -> None:
    vocab, count = 16, 8000
    logits = np.random.default_rng(7).normal(size=vocab).astype(np.float32) * 1.5
    prompt, generated = (1, 2), (2, 3, 3)
    past = row_history(prompt, generated, vocab_size=vocab)

    if along == "positions":
        batch = SamplingBatch([sampling], vocab_size=vocab)
        tiled = mx.broadcast_to(mx.array(logits), (1, count, vocab))
        tokens = batch.choose(tiled, mx.array([0]), history=[past])
    else:
        batch = SamplingBatch([replace(sampling, seed=seed) for seed in range(count)], vocab_size=vocab)
        tiled = mx.broadcast_to(mx.array(logits), (count, 1, vocab))
        tokens = batch.choose(tiled, mx.zeros((count,), mx.int32), history=[past] * count)

    scores = penalised(logits.astype(np.float64), sampling, prompt=prompt, generated=generated) / sampling.temperature
    law = np.exp(filtered(scores, sampling))
    drawn = np.bincount(np.array(tokens).ravel(), minlength=vocab)
    assert drawn[law == 0].sum() == 0
    assert stats.chisquare(drawn[law > 0], count * law[law > 0] / law.sum()).pvalue > 0.001
