"""The audit itself: that it passes what the sampler takes, and nothing else. Models: tables of fixed logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mtplx_core.engine import SamplingParams
from mtplx_core.sampling.audit import audit, compare
from mtplx_core.sampling.penalties import row_history
from mtplx_core.sampling.sampler import SamplingBatch

VOCAB = 40
PROMPT = (0, 1, 0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, top_k=30, min_p=0.01, frequency_penalty=0.5, seed=11)


class Model:
    """A model without layers, whose logits are a function of its tokens."""

    layers = ()

    def __init__(self, logits_of: Callable[[mx.array], mx.array]) -> None:
        self._logits_of = logits_of

    def __call__(self, tokens: mx.array, cache: object = None) -> mx.array:
        return self._logits_of(tokens)


def bigram_model(*, dtype: mx.Dtype = mx.float32) -> Model:
    """Logits that depend on the last token alone."""
    table = mx.random.normal((VOCAB, VOCAB), key=mx.random.key(3)).astype(dtype) * 2
    return Model(lambda tokens: table[tokens])


def constant_model(logits: list[float], *, dtype: mx.Dtype = mx.float32) -> Model:
    row = mx.array(logits).astype(dtype)
    return Model(lambda tokens: mx.broadcast_to(row, (*tokens.shape, row.size)))


def decode(model: Model, sampling: SamplingParams, *, count: int = 40) -> list[int]:
    """Token by token, as an engine would."""
    batch = SamplingBatch([sampling], vocab_size=VOCAB)
    output: list[int] = []
    for position in range(count):
        logits = model(mx.array([[*PROMPT, *output]]))[:, -1:]
        past = row_history(PROMPT, output, vocab_size=VOCAB)
        token: Any = batch.choose(logits, mx.array([position]), history=[past]).item()
        output.append(token)
    return output


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_audit_passes_what_the_sampler_takes(sampling: SamplingParams) -> None:
    model = bigram_model()

    result = audit(model, PROMPT, decode(model, sampling), sampling)

    assert result.passed
    assert result.positions == 40
    assert not result.mismatches


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("place", [0, 17, 39])
def test_audit_names_the_position_of_a_wrong_token(sampling: SamplingParams, place: int) -> None:
    model = bigram_model()
    output = decode(model, sampling)
    right = output[place]
    output[place] = (right + 1) % VOCAB

    result = audit(model, PROMPT, output, sampling)

    assert not result.passed
    assert result.mismatches[0].position == place
    assert result.mismatches[0].top == right
    assert result.mismatches[0].gap > result.tolerance


CHANGES = {
    "seed": replace(SAMPLED, seed=12),
    "high word of the seed": replace(SAMPLED, seed=11 + 2**32),
    "temperature": replace(SAMPLED, temperature=1.2),
    "top_k": replace(SAMPLED, top_k=2),
    "top_p": replace(SAMPLED, top_p=0.3),
    "frequency penalty": replace(SAMPLED, frequency_penalty=1.5),
    "greedy": SamplingParams(),
}


@pytest.mark.parametrize("other", CHANGES.values(), ids=CHANGES.keys())
def test_audit_fails_an_answer_made_with_other_parameters(other: SamplingParams) -> None:
    model = bigram_model()

    assert not audit(model, PROMPT, decode(model, other), SAMPLED).passed


def test_audit_fails_an_answer_shifted_by_one_position() -> None:
    model = bigram_model()

    assert not audit(model, PROMPT, decode(model, SAMPLED)[1:], SAMPLED).passed


@pytest.mark.parametrize(("gap", "passes"), [(0.0, True), (5e-4, True), (2e-3, False)])
def test_audit_takes_a_tie_for_what_it_is(gap: float, passes: bool) -> None:
    model = constant_model([0.0, 1.0, 1.0 + gap])

    result = audit(model, PROMPT, [1], SamplingParams())

    assert result.passed == passes


@pytest.mark.parametrize(("share", "passes"), [(0.5 - 2e-4, True), (0.5 + 2e-4, True), (0.53, False)])
def test_audit_counts_the_edge_of_the_nucleus_as_a_tie(share: float, passes: bool) -> None:
    """The second token is in the nucleus of 0.5 iff the first holds less than that."""
    sampling = SamplingParams(temperature=1.0, top_p=0.5)
    model = constant_model([math.log(share), math.log(1 - share)])
    noise = SamplingBatch([SamplingParams(temperature=1.0)], vocab_size=2).scores(mx.zeros((1, 64, 2)), mx.array([0]))
    place = int(np.argmax(np.array(noise[0, :, 1] - noise[0, :, 0])))
    output = [0] * place + [1]

    result = audit(model, PROMPT, output, sampling)

    assert all(mismatch.position != place for mismatch in result.mismatches) == passes


def test_audit_gives_a_filtered_token_an_infinite_gap() -> None:
    result = audit(constant_model([5.0, 0.0]), PROMPT, [1], SamplingParams(temperature=1.0, top_k=1))

    assert result.mismatches[0].gap == math.inf


def test_audit_allows_two_ulps_of_half_precision() -> None:
    near, far = constant_model([20.0, 20.25], dtype=mx.bfloat16), constant_model([20.0, 20.5], dtype=mx.bfloat16)

    assert audit(near, PROMPT, [0], SamplingParams(), tolerance=0.2).passed is False
    assert audit(constant_model([20.0, 20.125], dtype=mx.bfloat16), PROMPT, [0], SamplingParams()).passed
    assert not audit(far, PROMPT, [0], SamplingParams()).passed


def test_audit_of_nothing_passes() -> None:
    assert audit(bigram_model(), PROMPT, [], SAMPLED).passed


def test_comparison_of_equal_answers_finds_no_difference() -> None:
    result = compare(bigram_model(), PROMPT, [1, 2], [1, 2], SAMPLED)

    assert result.first_difference is None
    assert result.passed


@pytest.mark.parametrize(("gap", "passes"), [(5e-4, True), (2e-3, False)])
def test_comparison_passes_answers_that_part_at_a_tie(gap: float, passes: bool) -> None:
    model = constant_model([0.0, 1.0, 1.0 + gap])

    result = compare(model, PROMPT, [2, 1, 0], [2, 2, 2], SamplingParams())

    assert result.first_difference == 1
    assert result.passed == passes


def test_comparison_judges_both_tokens_at_the_difference() -> None:
    model = constant_model([0.0, 1.0, 1.0, 1.5])

    assert not compare(model, PROMPT, [1], [2], SamplingParams()).passed


def test_comparison_fails_when_one_answer_ends_before_the_other() -> None:
    result = compare(bigram_model(), PROMPT, [1, 2], [1, 2, 3], SAMPLED)

    assert result.first_difference == 2
    assert not result.passed
