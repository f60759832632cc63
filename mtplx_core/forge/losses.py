"""What a head is trained to do: say what the trunk says, over the draft vocabulary, and land where its states land."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mtplx_core.forge.lessons import LessonBatch


@dataclass(frozen=True, eq=False)
class DraftTable:
    """The draft vocabulary's unembedding and where each token stands in it."""

    rows: mx.array
    """(draft vocabulary, hidden) float32"""
    slots: mx.array
    """Index into `rows` by token id, -1 for the rest; (vocab,) int32."""

    @classmethod
    def of(cls, unembedding: mx.array, draft_ids: mx.array, *, vocab_size: int) -> DraftTable:
        slots = mx.full((vocab_size,), -1, mx.int32)
        slots[draft_ids] = mx.arange(draft_ids.size, dtype=mx.int32)
        table = cls(unembedding.astype(mx.float32), slots)
        mx.eval(table.rows, table.slots)
        return table


def draft_loss(
    predicted: mx.array, batch: LessonBatch, table: DraftTable, *, weights: mx.array, sharpness: float, scored: mx.array
) -> mx.array:
    """Cross-entropy of the head's distribution against the trunk's TOP tokens, a weighted mean over some pairs.

    Tokens outside the draft vocabulary are left out of both sides.

    Args:
        predicted: the head's output, (rows, positions, hidden).
        weights: (rows, positions)
        sharpness: share of the trunk's whole mass that is moved onto its likeliest token.
        scored: which pairs, (pairs,) int32 indexes into rows * positions.
    """
    states = _flat(predicted)[scored]  # (pairs, hidden)
    slots = table.slots[_flat(batch.top_ids)[scored]]  # (pairs, TOP)
    mass = mx.exp(_flat(batch.top_logprobs)[scored]) * (1 - sharpness)
    mass = mx.concatenate([mass[:, :1] + sharpness, mass[:, 1:]], axis=-1)
    mass = mx.where(slots >= 0, mass, 0.0)
    # Expected unembedding: the same as gathering from the logits, without a scatter on the way back.
    expected = (mass[:, None] @ table.rows[mx.maximum(slots, 0)]).squeeze(1)
    normaliser = mx.logsumexp(states @ table.rows.T, axis=-1)
    losses = mass.sum(axis=-1) * normaliser - (expected * states).sum(axis=-1)
    weight = weights.reshape(-1)[scored]
    return (losses * weight).sum() / mx.maximum(weight.sum(), 1.0)


def state_loss(predicted: mx.array, batch: LessonBatch, *, weights: mx.array) -> mx.array:
    """Smooth L1 between the head's output and the trunk's next hidden state, a weighted mean over pairs."""
    gap = mx.abs(predicted - batch.hidden[:, 1:])
    smooth = mx.where(gap < 1, 0.5 * gap * gap, gap - 0.5).mean(axis=-1)
    return (smooth * weights).sum() / mx.maximum(weights.sum(), 1.0)


def _flat(array: mx.array) -> mx.array:
    """(rows * positions, last)"""
    return array.reshape(-1, array.shape[-1])
