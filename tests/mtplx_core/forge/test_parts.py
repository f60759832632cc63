"""The forge's pure parts: holding out, batches, losses, the optimiser, the curve. No engine, no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mtplx_core.forge.curve import Point, draw_curve
from mtplx_core.forge.lessons import HoldOut, batch_lessons, collate, shared_opening
from mtplx_core.forge.losses import DraftTable, draft_loss, state_loss
from mtplx_core.forge.optimiser import LearningRates, apply, average_of, orthogonal, start_state
from mtplx_core.forge.recipe import Recipe
from mtplx_core.forge.states import TOP, Lesson, most_likely


def lesson(length: int, *, answer_start: int = 3, states: int | None = None) -> Lesson:
    draws = np.random.default_rng(length)
    states = length if states is None else states
    return Lesson(
        tokens=np.arange(length, dtype=np.uint32) % 50,
        hidden=draws.normal(size=(states, 8)).astype(np.float16),
        top_ids=draws.integers(0, 50, (states, TOP)).astype(np.uint32),
        top_logprobs=np.log(np.full((states, TOP), 0.05)).astype(np.float16),
        answer_start=answer_start,
        temperature=0.0,
    )


def test_hold_out_keeps_a_prompt_that_names_a_topic() -> None:
    hold_out = HoldOut([(7, 8)])

    assert hold_out.has((1, 2, 7, 8, 3))
    assert hold_out.has((7, 8))


def test_hold_out_keeps_one_prompt_in_sixteen_otherwise() -> None:
    kept = sum(HoldOut().has((number, 1)) for number in range(3200))

    assert 150 < kept < 250


def test_pairs_look_one_token_ahead_of_their_state() -> None:
    one = lesson(6)

    batch = collate([one])

    assert batch.tokens.tolist() == [one.tokens[1:].tolist()]
    assert batch.top_ids.tolist() == [one.top_ids[1:].tolist()]
    assert batch.hidden.shape == (1, 6, 8)


def test_pairs_that_predict_the_answer_start_two_before_it() -> None:
    batch = collate([lesson(6, answer_start=3)])

    assert batch.is_answer.tolist() == [[False, True, True, True, True]]


def test_sequence_whose_last_token_has_no_state_ends_a_pair_earlier() -> None:
    batch = collate([lesson(6, states=5), lesson(6)])

    assert batch.is_pair.sum(axis=1).tolist() == [4, 5]


def test_batches_stay_within_their_positions_with_padding() -> None:
    groups = batch_lessons([lesson(length) for length in range(4, 40)], positions=64)

    assert max(max(len(one.hidden) for one in group) * len(group) for group in groups) <= 64
    assert sum(len(group) for group in groups) == 36


def test_shared_opening_ends_where_prompts_part() -> None:
    lessons = [Lesson(np.array([9, 9, number, 9]), *_states(4), answer_start=4, temperature=0.0) for number in range(5)]

    assert shared_opening(lessons) == 2


def test_most_likely_tokens_are_those_of_a_full_sort() -> None:
    logits = mx.random.normal((7, 1000), key=mx.random.key(0))

    top = most_likely(logits)

    expected = np.sort(np.array(logits), axis=-1)[:, ::-1][:, :TOP]
    normaliser = np.array(mx.logsumexp(logits, axis=-1))[:, None]
    np.testing.assert_allclose(np.array(top.logprobs), expected - normaliser, atol=1e-5)
    np.testing.assert_allclose(np.exp(np.array(top.logprobs)).sum(-1) + np.array(top.rest), 1.0, atol=1e-5)


def test_draft_loss_is_the_cross_entropy_within_the_draft_vocabulary() -> None:
    batch = collate([lesson(5)])
    ids = mx.arange(0, 50, 2, dtype=mx.int32)
    unembedding = mx.random.normal((25, 8), key=mx.random.key(1))
    table = DraftTable.of(unembedding, ids, vocab_size=50)
    predicted = mx.random.normal((1, 4, 8), key=mx.random.key(2))

    loss = draft_loss(predicted, batch, table, weights=mx.ones((1, 4)), sharpness=0.0, scored=mx.arange(4))

    logits = np.array(predicted[0] @ unembedding.T)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = np.array(batch.top_ids[0])
    mass = np.exp(np.array(batch.top_logprobs[0])) * (wanted % 2 == 0)
    expected = -(mass * np.take_along_axis(logprobs, wanted // 2, axis=1)).sum(-1).mean()
    assert float(loss) == pytest.approx(expected, rel=1e-4)


def test_state_loss_is_nothing_at_the_trunks_own_states() -> None:
    batch = collate([lesson(5)])

    assert float(state_loss(batch.hidden[:, 1:], batch, weights=mx.ones((1, 4)))) == 0.0


@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (16, 16)], ids=str)
def test_orthogonal_brings_singular_values_near_one(shape: tuple[int, int]) -> None:
    matrix = mx.random.normal(shape, key=mx.random.key(3))

    values = np.linalg.svd(np.array(orthogonal(matrix)), compute_uv=False)

    assert values.max() < 1.3
    assert np.median(values) > 0.6


def test_optimiser_finds_a_matrix_and_a_gain() -> None:
    wanted = {"matrix": mx.random.normal((6, 6), key=mx.random.key(4)), "gain": mx.arange(6.0)}
    weights = {name: mx.zeros_like(value) for name, value in wanted.items()}
    state = start_state(weights)

    for step in range(1, 301):
        gradients = {name: weights[name] - wanted[name] for name in weights}
        factor = 1 - step / 301
        rates = LearningRates(matrices=0.1 * factor, gains=0.1 * factor, decay=0.0, average=0.9)
        weights, state = apply(weights, gradients, state, step=step, rates=rates)
        mx.eval(weights, state)

    for name, value in average_of(state).items():
        assert np.abs(np.array(value - wanted[name])).max() < 0.2


def test_rates_rise_then_fall() -> None:
    recipe = Recipe()

    rates = [recipe.rate_at(done) for done in (0.0, 0.03, 0.5, 1.0)]

    assert rates[0] < rates[2] < rates[1]
    assert rates[3] == pytest.approx(0.02)


def test_curve_is_a_picture_of_all_points(tmp_path: Path) -> None:
    draw_curve([Point(0, 0.0, 0.3), Point(50, 3.0, 0.4), Point(100, 2.0, 0.5)], tmp_path / "c.svg", title="a <b>")

    root = ElementTree.parse(tmp_path / "c.svg").getroot()
    lines = [element.attrib["points"].split() for element in root.iter() if element.tag.endswith("polyline")]
    assert [len(points) for points in lines] == [2, 3]


def _states(count: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    one = lesson(count)
    return one.hidden, one.top_ids, one.top_logprobs
