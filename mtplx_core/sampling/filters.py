"""Which tokens may be sampled: min_p, then top_k, then top_p, on logits after temperature.

Every bound is a value, never a rank in a sorted order: tokens of equal logit are kept or dropped together, so the
outcome does not depend on how a sort breaks ties, and each row's outcome is the same in any batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mtplx_core.engine import SamplingParams
from mtplx_core.sampling.penalties import column

_SORTED_AT_MOST = 2048
_LEAST_MASS = 1e-30


class FilterRows(NamedTuple):
    """The filters of the rows of one group."""

    log_min_p: mx.array | None
    """(rows, 1, 1) float32; None where no row has one."""
    top_k: tuple[int, ...] | None
    """0 means no bound."""
    top_p: mx.array | None
    """(rows, 1, 1) float32"""


def has_filters(sampling: SamplingParams) -> bool:
    return sampling.min_p > 0.0 or sampling.top_k > 0 or sampling.top_p < 1.0


def filter_rows(rows: Sequence[SamplingParams]) -> FilterRows:
    min_p = [row.min_p for row in rows]
    top_k = tuple(row.top_k for row in rows)
    top_p = [row.top_p for row in rows]
    return FilterRows(
        log_min_p=column([math.log(p) if p > 0 else -math.inf for p in min_p]) if max(min_p) > 0 else None,
        top_k=top_k if any(top_k) else None,
        top_p=column(top_p) if min(top_p) < 1.0 else None,
    )


def apply_filters(logits: mx.array, filters: FilterRows) -> mx.array:
    """Logits with minus infinity where a filter drops the token; (rows, positions, vocab) float32 both."""
    if filters.log_min_p is not None:
        logits = _keep(logits, logits >= logits.max(axis=-1, keepdims=True) + filters.log_min_p)
    if filters.top_k is not None:
        logits = _keep(logits, logits >= _kth_largest(logits, filters.top_k))
    if filters.top_p is not None:
        weights = mx.exp(logits - logits.max(axis=-1, keepdims=True))
        logits = _keep(logits, weights >= _nucleus_bound(weights, filters.top_p))
    return logits


def _keep(logits: mx.array, kept: mx.array) -> mx.array:
    return mx.where(kept, logits, -mx.inf)


def _kth_largest(logits: mx.array, top_k: Sequence[int]) -> mx.array:
    """The smallest value each row keeps, (rows, positions, 1); minus infinity without a bound."""
    vocab = logits.shape[-1]
    bounds = [min(k, vocab) if k else 0 for k in top_k]
    best = -mx.sort(-mx.topk(logits, max(bounds), axis=-1), axis=-1)  # (rows, positions, largest k), descending
    index = mx.array([max(k - 1, 0) for k in bounds]).reshape(-1, 1, 1)
    kth = mx.take_along_axis(best, mx.broadcast_to(index, (*best.shape[:-1], 1)), axis=-1)
    return mx.where(mx.array([k > 0 for k in bounds]).reshape(-1, 1, 1), kth, -mx.inf)


def _nucleus_bound(weights: mx.array, top_p: mx.array) -> mx.array:
    """The smallest weight kept: a token stays iff those heavier than it hold less than `top_p` of the whole.

    A selection by halves instead of a full sort: each round splits the values still in question into the heavier and
    the lighter half and goes on with the one in which the kept mass reaches its goal.
    """
    goal = mx.maximum(top_p * weights.sum(axis=-1, keepdims=True), _LEAST_MASS)  # the heaviest always stays
    above = mx.zeros_like(goal)  # mass of everything heavier than the values still in question
    values = _pad_to_halvable(weights)
    while values.shape[-1] > _SORTED_AT_MOST:
        half = values.shape[-1] // 2
        split = mx.partition(values, half, axis=-1)
        heavy, light = split[..., half:], split[..., :half]
        reached = above + heavy.sum(axis=-1, keepdims=True)
        is_heavy = reached >= goal
        values = mx.where(is_heavy, heavy, light)
        above = mx.where(is_heavy, above, reached)
    ordered = -mx.sort(-values, axis=-1)
    mass_before = above + mx.cumsum(ordered, axis=-1) - ordered
    kept = mx.where(mass_before < goal, ordered, mx.inf)
    return mx.where(top_p < 1.0, kept.min(axis=-1, keepdims=True), 0.0)


def _pad_to_halvable(weights: mx.array) -> mx.array:
    """Zeros appended so that halving always works out; they weigh nothing and come last."""
    size, rounds = weights.shape[-1], 0
    while size > _SORTED_AT_MOST:
        size, rounds = (size + 1) // 2, rounds + 1
    missing = (size << rounds) - weights.shape[-1]
    return mx.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, missing)]) if missing else weights
