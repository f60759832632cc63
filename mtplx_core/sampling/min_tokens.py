"""Keeps a row from ending early: before `min_tokens` completion tokens, no token that ends the row can be chosen.

The bar is set by position in the completion, so one verify step may bar the ends at its first positions and allow
them behind. It is minus infinity on raw logits, which bias, penalties and temperature leave as it is: setting it
before them is the same as setting it behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mtplx_core.engine import SamplingParams


class EndBar(NamedTuple):
    """The bars of the rows of a batch."""

    until: mx.array
    """First position at which the row may end, (rows, 1, 1) int32."""
    ends: mx.array
    """Which tokens end the row, (rows, 1, vocab) bool."""


def end_bar(rows: Sequence[SamplingParams], *, vocab_size: int) -> EndBar | None:
    """The bars of `rows`; None where every row may end at once."""
    if not any(row.min_tokens for row in rows):
        return None
    ends = np.zeros((len(rows), 1, vocab_size), np.bool_)
    for index, row in enumerate(rows):
        ends[index, 0, [token for token in row.end_token_ids if 0 <= token < vocab_size]] = row.min_tokens > 0
    until = mx.array([row.min_tokens for row in rows], mx.int32).reshape(-1, 1, 1)
    return EndBar(until, mx.array(ends))


def bar_ends(logits: mx.array, bar: EndBar | None, starts: mx.array, *, vocabulary: mx.array | None = None) -> mx.array:
    """Logits with minus infinity for the ends of a row at the positions where it may not end yet.

    Args:
        logits: (rows, positions, vocab), or (rows, positions, tokens) with `vocabulary`.
        starts: position in the completion that `logits[:, 0]` predicts, (rows,) integer.
        vocabulary: (tokens,) ids of the last axis; None means all.
    """
    if bar is None:
        return logits
    positions = starts[:, None, None] + mx.arange(logits.shape[1])[:, None]  # (rows, positions, 1)
    ends = bar.ends if vocabulary is None else bar.ends[..., vocabulary]
    return mx.where((positions < bar.until) & ends, -mx.inf, logits)
