"""Masks of rows for attention that groups its queries by key head.

Most of mlx-lm's families hand their mask to one function that knows how queries are laid out. Gemma-2, whose scores
are capped, computes attention itself, over (rows, key heads, queries per key head, positions, keys), and a mask that
differs by row, (rows, 1 or query heads, positions, keys), would meet the wrong axes there.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import gemma2


class _Grouped:
    """Marks a module whose masks are laid out here."""


def group_masks(model: Any) -> None:
    """Lay masks out for the attention inside a model that groups its queries; doing it twice is doing it once."""
    for part in model.modules():
        if isinstance(part, gemma2.Attention) and not isinstance(part, _Grouped) and part.repeats > 1:
            part.__class__ = _GroupedGemma2


class _GroupedGemma2(_Grouped, gemma2.Attention):
    """mlx-lm's attention with a mask of its own axes."""

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if mask is not None and mask.ndim == 4:
            mask = _grouped(mask, self.n_kv_heads)
        attended: mx.array = super().__call__(x, mask, cache)
        return attended


def _grouped(mask: mx.array, key_heads: int) -> mx.array:
    """(rows, 1 or key heads, 1 or queries per key head, positions, keys)"""
    rows, heads, positions, keys = mask.shape
    if heads == 1:
        return mask[:, :, None]
    return mask.reshape(rows, key_heads, heads // key_heads, positions, keys)
