"""Log-probabilities that clients see: float32 log-softmax of the raw logits, before any sampling parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mtplx_core.engine import TokenLogprob


class LogprobArrays(NamedTuple):
    """Still on the device; evaluate it together with the tokens."""

    chosen: mx.array
    """(rows, positions) float32"""
    top_ids: mx.array
    """(rows, positions, top) uint32, most likely first"""
    top: mx.array
    """(rows, positions, top) float32"""


def logprob_arrays(logits: mx.array, tokens: mx.array, *, top: int) -> LogprobArrays:
    """Log-probabilities of `tokens` and of the `top` most likely ones.

    Args:
        logits: raw logits, (rows, positions, vocab), any float type.
        tokens: chosen tokens, (rows, positions).
        top: how many of the most likely; at least the largest number any row asks for.
    """
    logits = logits.astype(mx.float32)
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logits, tokens[..., None].astype(mx.int32), axis=-1)
    if top == 0:
        none = mx.zeros((*tokens.shape, 0))
        return LogprobArrays((chosen - total)[..., 0], none.astype(mx.uint32), none)
    ids = mx.argpartition(-logits, top - 1, axis=-1)[..., :top]
    values = mx.take_along_axis(logits, ids, axis=-1)
    order = mx.argsort(-values, axis=-1)
    ids, values = mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(values, order, axis=-1)
    return LogprobArrays((chosen - total)[..., 0], ids.astype(mx.uint32), values - total)


def row_logprobs(arrays: LogprobArrays, *, row: int, count: int, top: int) -> tuple[TokenLogprob, ...]:
    """The first `count` positions of a row, each with its `top` most likely tokens; reads evaluated arrays."""
    chosen: Any = arrays.chosen[row, :count].tolist()
    ids: Any = arrays.top_ids[row, :count, :top].tolist()
    values: Any = arrays.top[row, :count, :top].tolist()
    return tuple(_one(*entry) for entry in zip(chosen, ids, values, strict=True))


def _one(logprob: float, ids: Sequence[int], values: Sequence[float]) -> TokenLogprob:
    return TokenLogprob(logprob, tuple(zip(ids, values, strict=True)))
