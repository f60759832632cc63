"""The sampler once more in NumPy and plain loops, one row and position at a time, to compare the real one with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mtplx_core.engine import SamplingParams

Floats = npt.NDArray[np.float64]
MASK = 0xFFFFFFFF


def reference_bits(seed: int, position: int, token: int) -> int:
    """The 32 hashed bits of one token, in unbounded Python integers."""
    low, high = seed & MASK, seed >> 32
    first = mix((mix(mix(((position + 1) * 0x9E3779B9 + low) & MASK) ^ high) + position) & MASK)
    second = mix(mix((first + high) & MASK) ^ low)
    return mix((mix(token ^ first) + second) & MASK)


def mix(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def reference_gumbel(seed: int, position: int, vocab_size: int) -> Floats:
    bits = np.array([reference_bits(seed, position, token) for token in range(vocab_size)], np.float64)
    return -np.log(-np.log1p(-(bits + 0.5) / 2.0**32))


def reference_scores(
    logits: npt.ArrayLike,
    sampling: SamplingParams,
    *,
    position: int,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
) -> Floats:
    """What the sampler takes the largest of, for one row and position."""
    scores = penalised(np.array(logits, np.float64), sampling, prompt=prompt, generated=generated)
    if sampling.is_greedy:
        return scores
    scores = filtered(scores / sampling.temperature, sampling)
    return scores + reference_gumbel(sampling.seed, position, len(scores))


def penalised(scores: Floats, sampling: SamplingParams, *, prompt: Sequence[int], generated: Sequence[int]) -> Floats:
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    for token in {*prompt, *generated}:
        rate = sampling.repetition_penalty
        scores[token] = scores[token] / rate if scores[token] > 0 else scores[token] * rate
    for token, count in Counter(generated).items():
        scores[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return scores


def filtered(scores: Floats, sampling: SamplingParams) -> Floats:
    if sampling.min_p > 0:
        scores = np.where(scores >= scores.max() + math.log(sampling.min_p), scores, -np.inf)
    if sampling.top_k > 0:
        kth = np.sort(scores)[-min(sampling.top_k, len(scores))]
        scores = np.where(scores >= kth, scores, -np.inf)
    if sampling.top_p < 1.0:
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        heavier = np.array([weights[weights > weight].sum() for weight in weights])
        scores = np.where(heavier < sampling.top_p, scores, -np.inf)
    return scores
