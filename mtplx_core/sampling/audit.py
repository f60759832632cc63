"""Checks an answer token by token against one plain forward: is each token what the sampler takes there, up to ties?

An answer is a function of model, prompt, parameters and seed, so it can be checked after the fact, whichever engine
made it, at whatever width and depth and however often it was resumed. No two runs need to be kept in step. The filters
are written out once more here, with slack, so that a token at the very edge of one counts as a tie as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mtplx_core.engine import SamplingParams
from mtplx_core.models.own_call import logits_in_one_forward
from mtplx_core.sampling.min_tokens import bar_ends, end_bar
from mtplx_core.sampling.noise import gumbel, noise_keys, seed_words
from mtplx_core.sampling.penalties import has_penalties, penalise, penalty_rows, row_history

FLOAT32_TOLERANCE = 1e-3
_ULPS = 2
_MANTISSA_BITS = {mx.float16: 10, mx.bfloat16: 7}
_BLOCK = 16
"""Positions scored at once; bounds memory."""

Floats = npt.NDArray[np.float64]


class Mismatch(NamedTuple):
    """A position whose token is not the top one."""

    position: int
    token: int
    top: int
    gap: float
    """How far the token's noisy score lies below the top; infinite where a filter drops it beyond all slack."""


@dataclass(frozen=True, slots=True)
class Audit:
    """What one forward says about an answer."""

    positions: int
    tolerance: float
    mismatches: tuple[Mismatch, ...]

    @property
    def passed(self) -> bool:
        """Whether every mismatch is a tie."""
        return all(mismatch.gap < self.tolerance for mismatch in self.mismatches)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two answers to one request relate."""

    first_difference: int | None
    """None: equal token by token."""
    audit: Audit | None = None
    """Both tokens at the first difference; None where there is nothing to score: one answer ends before the other."""

    @property
    def passed(self) -> bool:
        """Whether the answers are equal, or differ first at a tie."""
        return self.first_difference is None or (self.audit is not None and self.audit.passed)


def audit(
    model: Any,
    prompt: Sequence[int],
    output: Sequence[int],
    sampling: SamplingParams,
    *,
    tolerance: float | None = None,
) -> Audit:
    """Re-derive every token of `output`, each from the tokens before it.

    Args:
        model: an mlx-lm model; it is run once, with fresh caches, over prompt and output.
        tolerance: gap in noisy scores that counts as a tie; by default 1e-3 for float32 logits and two units in the
            last place for half precision.
    """
    tolerance, mismatches = _mismatches(model, prompt, output, [[token] for token in output], sampling, tolerance)
    return Audit(len(output), tolerance, mismatches)


def compare(
    model: Any,
    prompt: Sequence[int],
    one: Sequence[int],
    other: Sequence[int],
    sampling: SamplingParams,
    *,
    tolerance: float | None = None,
) -> Comparison:
    """Whether two answers are equal, or part at a tie; what follows a tie is not comparable and not looked at."""
    place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if place is None:
        return Comparison(None) if len(one) == len(other) else Comparison(min(len(one), len(other)))
    judged: list[list[int]] = [[] for _ in range(place)] + [[one[place], other[place]]]
    tolerance, mismatches = _mismatches(model, prompt, one[: place + 1], judged, sampling, tolerance)
    return Comparison(place, Audit(1, tolerance, mismatches))


def _mismatches(
    model: Any,
    prompt: Sequence[int],
    output: Sequence[int],
    judged: Sequence[Sequence[int]],
    sampling: SamplingParams,
    tolerance: float | None,
) -> tuple[float, tuple[Mismatch, ...]]:
    """Judge some tokens at each position of `output`."""
    if not output:
        return tolerance or FLOAT32_TOLERANCE, ()
    tokens = mx.array([[*prompt, *output[:-1]]])
    logits = logits_in_one_forward(model, tokens)[:, len(prompt) - 1 :]
    if tolerance is None:
        tolerance = _tolerance(logits) / (sampling.temperature or 1.0 if logits.dtype != mx.float32 else 1.0)
    found: list[Mismatch] = []
    for position, (scores, noise) in enumerate(_scores(logits, prompt, output, sampling)):
        if judged[position]:
            found += _judge(position, judged[position], scores, noise, sampling, tolerance)
    return tolerance, tuple(found)


def _scores(
    logits: mx.array, prompt: Sequence[int], output: Sequence[int], sampling: SamplingParams
) -> Iterator[tuple[Floats, Floats]]:
    """Scores before filters, and noise, for each position; (vocab,) each."""
    vocab_size = logits.shape[-1]
    penalties = penalty_rows([sampling], vocab_size=vocab_size)
    bar = end_bar([sampling], vocab_size=vocab_size)
    for start in range(0, len(output), _BLOCK):
        block = logits[:, start : start + _BLOCK].astype(mx.float32)
        positions = block.shape[1]
        drafts = mx.array([list(output[start : start + positions - 1])], mx.int32)
        past = row_history(prompt, output[:start], vocab_size=vocab_size) if has_penalties(sampling) else None
        scores = penalise(block, penalties, history=[past], drafts=drafts)
        scores = bar_ends(scores, bar, mx.array([start]))
        noise = mx.zeros_like(scores)
        if not sampling.is_greedy:
            scores = scores / sampling.temperature
            keys = noise_keys(seed_words([sampling.seed]), start + mx.arange(positions)[None])
            noise = gumbel(keys, mx.arange(vocab_size))
        yield from zip(np.array(scores[0], np.float64), np.array(noise[0], np.float64), strict=True)


def _judge(
    position: int,
    tokens: Sequence[int],
    scores: Floats,
    noise: Floats,
    sampling: SamplingParams,
    tolerance: float,
) -> list[Mismatch]:
    certain = np.where(_kept(scores, sampling, slack=-tolerance), scores + noise, -np.inf)
    possible = np.where(_kept(scores, sampling, slack=tolerance), scores + noise, -np.inf)
    top = int(certain.argmax())
    gaps = [(token, float(certain[top] - possible[token])) for token in tokens]
    return [Mismatch(position, token, top, gap) for token, gap in gaps if token != top and not gap < 0]


def _kept(scores: Floats, sampling: SamplingParams, *, slack: float) -> npt.NDArray[np.bool_]:
    """Tokens that pass the filters, with bounds loosened (or, negative, tightened) by `slack`."""
    kept = np.ones(scores.shape, np.bool_)
    if sampling.is_greedy:
        return kept
    if sampling.min_p > 0:
        kept &= scores >= scores.max() + math.log(sampling.min_p) - slack
    if 0 < sampling.top_k < scores.size:
        kth = np.partition(np.where(kept, scores, -np.inf), -sampling.top_k)[-sampling.top_k]
        kept &= scores >= kth - slack
    if sampling.top_p < 1.0:
        weights = np.where(kept, np.exp(scores - scores.max()), 0.0)
        order = np.argsort(-weights, kind="stable")
        heavier = np.empty_like(weights)
        heavier[order] = np.cumsum(weights[order]) - weights[order]
        kept &= heavier < (sampling.top_p + slack) * weights.sum()
    kept[scores.argmax()] = True
    return kept


def _tolerance(logits: mx.array) -> float:
    """A tie, in logits."""
    bits = _MANTISSA_BITS.get(logits.dtype)
    if bits is None:
        return FLOAT32_TOLERANCE
    largest: Any = mx.max(mx.abs(logits.astype(mx.float32))).item()
    return float(_ULPS * 2.0 ** (math.floor(math.log2(max(largest, 1.0))) - bits))
