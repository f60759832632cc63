"""What a row's sampling does to its logits before any temperature: bias, then repetition, frequency, presence.

Frequency and presence count generated tokens, repetition the prompt's too. Neutral parameters leave logits as they
are, bit for bit, so rows with and without penalties may share a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mtplx_core.engine import SamplingParams


class RowHistory(NamedTuple):
    """What one row's penalties look at."""

    generated: mx.array
    """How often each token stands in the completion so far, (vocab,) float32."""
    prompt: mx.array
    """Whether each token stands in the prompt, (vocab,) bool."""

    def append(self, tokens: Sequence[int] | mx.array) -> RowHistory:
        """The history after some more generated tokens."""
        ids = tokens if isinstance(tokens, mx.array) else mx.array(list(tokens), mx.int32)
        return self._replace(generated=self.generated.at[ids].add(1.0))


class PenaltyRows(NamedTuple):
    """Bias and penalties of the rows of one group, each (rows, 1, 1) float32."""

    bias: mx.array | None
    """(rows, 1, vocab) float32"""
    repetition: mx.array | None
    """None where no row has one: it costs the most."""
    frequency: mx.array
    presence: mx.array


def has_bias(sampling: SamplingParams) -> bool:
    return bool(sampling.logit_bias)


def has_penalties(sampling: SamplingParams) -> bool:
    """Whether the row needs a history."""
    return sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0


def row_history(prompt: Sequence[int], completion: Sequence[int] | mx.array, *, vocab_size: int) -> RowHistory:
    """The history of a row with this prompt and completion so far."""
    seen = np.zeros(vocab_size, np.bool_)
    seen[np.asarray(prompt, np.int64)] = True
    return RowHistory(mx.zeros((vocab_size,), mx.float32), mx.array(seen)).append(completion)


def penalty_rows(rows: Sequence[SamplingParams], *, vocab_size: int) -> PenaltyRows:
    repetition = [row.repetition_penalty for row in rows]
    return PenaltyRows(
        bias=_bias(rows, vocab_size) if any(map(has_bias, rows)) else None,
        repetition=column(repetition) if any(rate != 1.0 for rate in repetition) else None,
        frequency=column([row.frequency_penalty for row in rows]),
        presence=column([row.presence_penalty for row in rows]),
    )


def penalise(
    logits: mx.array,
    penalties: PenaltyRows,
    *,
    history: Sequence[RowHistory | None],
    drafts: mx.array | None = None,
    vocabulary: mx.array | None = None,
) -> mx.array:
    """Logits after bias and penalties.

    Args:
        logits: (rows, positions, vocab) float32, or (rows, positions, tokens) with `vocabulary`.
        history: one per row; None where a row has no penalties.
        drafts: (rows, drafts) uncommitted tokens, taken to stand at the row's next positions. The last logits see
            all of them, the ones before see one less each.
        vocabulary: (tokens,) ids of the last axis; None means all.
    """
    if penalties.bias is not None:
        logits = logits + (penalties.bias if vocabulary is None else penalties.bias[..., vocabulary])
    present = [row for row in history if row is not None]
    if not present:
        return logits
    empty = RowHistory(mx.zeros_like(present[0].generated), mx.zeros_like(present[0].prompt))
    full = [row or empty for row in history]
    counts = mx.stack([row.generated for row in full])[:, None]  # (rows, 1, vocab)
    prompt = mx.stack([row.prompt for row in full])[:, None]
    if vocabulary is not None:
        counts, prompt = counts[..., vocabulary], prompt[..., vocabulary]
    if drafts is not None and drafts.shape[1]:
        ids = mx.arange(counts.shape[-1]) if vocabulary is None else vocabulary
        counts = counts + _draft_counts(drafts, ids, positions=logits.shape[1])
    if penalties.repetition is not None:
        repetition = mx.where(prompt | (counts > 0), penalties.repetition, 1.0)
        logits = mx.where(logits > 0, logits / repetition, logits * repetition)
    return logits - penalties.frequency * counts - penalties.presence * (counts > 0)


def column(values: Sequence[float]) -> mx.array:
    """(rows, 1, 1) float32"""
    return mx.array(list(values), mx.float32).reshape(-1, 1, 1)


def _draft_counts(drafts: mx.array, ids: mx.array, *, positions: int) -> mx.array:
    """How often each token stands among the drafts before each position, (rows, positions, tokens)."""
    hits = (drafts[..., None] == ids.astype(drafts.dtype)).astype(mx.float32)  # (rows, drafts, tokens)
    counts = mx.pad(mx.cumsum(hits, axis=1), [(0, 0), (1, 0), (0, 0)])
    return counts[:, counts.shape[1] - positions :]


def _bias(rows: Sequence[SamplingParams], vocab_size: int) -> mx.array:
    bias = np.zeros((len(rows), 1, vocab_size), np.float32)
    for index, row in enumerate(rows):
        for token, value in row.logit_bias:
            bias[index, 0, token] += value
    return mx.array(bias)
