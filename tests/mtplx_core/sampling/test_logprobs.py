"""Log-probabilities of raw logits. Engine: none."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from scipy.special import log_softmax

from mtplx_core.sampling.logprobs import logprob_arrays, row_logprobs

LOGITS = (np.random.default_rng(3).normal(size=(2, 3, 50)) * 4).astype(np.float32)
TOKENS = mx.array([[1, 2, 3], [4, 5, 6]], mx.uint32)


def test_logprobs_are_the_log_softmax_of_the_raw_logits() -> None:
    arrays = logprob_arrays(mx.array(LOGITS), TOKENS, top=4)

    second = row_logprobs(arrays, row=1, count=2, top=3)

    expected = log_softmax(LOGITS[1].astype(np.float64), axis=-1)
    assert len(second) == 2
    for position, entry in enumerate(second):
        order = np.argsort(-expected[position])[:3].tolist()
        assert entry.logprob == pytest.approx(expected[position, 4 + position], abs=1e-5)
        assert [token for token, _ in entry.top] == order
        assert [value for _, value in entry.top] == pytest.approx(expected[position, order].tolist(), abs=1e-5)


def test_logprobs_without_alternatives_hold_the_chosen_token_alone() -> None:
    arrays = logprob_arrays(mx.array(LOGITS), TOKENS, top=0)

    assert [entry.top for entry in row_logprobs(arrays, row=0, count=3, top=0)] == [(), (), ()]


def test_logprobs_of_half_precision_logits_are_float32() -> None:
    arrays = logprob_arrays(mx.array(LOGITS).astype(mx.float16), TOKENS, top=1)

    assert arrays.chosen.dtype == mx.float32
