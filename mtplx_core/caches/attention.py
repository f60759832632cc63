"""Attention over ragged caches where no fused kernel exists: on a CPU, where scores are made and kept in full.

There a verify step would read the keys once for each query head, and every row would pay for the longest. Queries that
share keys are put into one product instead, and each row attends to no more than its own length, rounded up. On a GPU
mlx-lm's own call stands, with the mask laid out for the layer's heads. Owns the arithmetic alone; what is visible, the
cache's mask says.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

from mtplx_core.caches.forward import RowSpan
from mtplx_core.caches.ragged_layer import RaggedLayer
from mtplx_core.caches.rebinding import rebound

_FUSED_POSITIONS = 8
_FUSED_QUERIES = 32
"""Of one key head, over all positions."""
_NAME = scaled_dot_product_attention.__name__


def fused_positions(queries_per_key: int) -> int:
    """Positions of a verify step that MLX's fused attention for few queries takes.

    Args:
        queries_per_key: query heads that share a key head.
    """
    return min(_FUSED_POSITIONS, _FUSED_QUERIES // queries_per_key)


class _Routed:
    """Marks a module whose attention comes here."""


def route_attention(module: Any) -> None:
    """Let all attention inside a module come here when it runs over a ragged cache; twice is once.

    Changes nothing for other caches.
    """
    for part in module.modules():
        kind = type(part)
        if isinstance(part, _Routed) or _NAME not in getattr(kind.__call__, "__code__", _NO_CODE).co_names:
            continue
        call = rebound(kind.__call__, {_NAME: attend})
        part.__class__ = type(kind.__name__, (_Routed, kind), {"__call__": call})


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """As mlx-lm's function of this name: (rows, query heads, positions, size)."""
    if not isinstance(cache, RaggedLayer) or is_on_gpu():
        if isinstance(cache, RaggedLayer):
            mask = cache.for_heads(mask, queries.shape[1])
        whole: mx.array = scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)
        return whole
    parts = [_attend_run(run, queries, keys, values, scale, seen, sinks) for run, seen in cache.by_run(mask)]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def is_on_gpu() -> bool:
    """Whether MLX runs where it has fused attention."""
    return bool(mx.default_device() == mx.Device(mx.gpu))


def _attend_run(
    run: RowSpan,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array,
    sinks: mx.array | None,
) -> mx.array:
    if run.stop - run.start < queries.shape[0] or run.attended < keys.shape[2]:
        rows = slice(run.start, run.stop)
        queries, keys, values = queries[rows], keys[rows, :, : run.attended], values[rows, :, : run.attended]
    count, heads, positions, size = queries.shape
    if positions == 1 or heads == keys.shape[1]:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    shared = heads // keys.shape[1]
    together = (queries * scale).reshape(count, keys.shape[1], shared * positions, size)
    scores = (together @ keys.swapaxes(-1, -2)).reshape(count, keys.shape[1], shared, positions, run.attended)
    weights = _weights(mx.where(mask[:, :, None], scores, -mx.inf), sinks)
    mixed = weights.reshape(count, keys.shape[1], shared * positions, run.attended) @ values
    return mixed.reshape(count, heads, positions, values.shape[-1])


def _weights(scores: mx.array, sinks: mx.array | None) -> mx.array:
    """Softmax over the keys, (rows, key heads, shared, positions, keys); a sink takes part like a key without value."""
    if sinks is None:
        return mx.softmax(scores, axis=-1, precise=True)
    column = mx.broadcast_to(sinks.astype(scores.dtype).reshape(1, *scores.shape[1:3], 1, 1), (*scores.shape[:-1], 1))
    return mx.softmax(mx.concatenate([scores, column], axis=-1), axis=-1, precise=True)[..., :-1]


class _NoCode:
    co_names: tuple[str, ...] = ()


_NO_CODE = _NoCode()
