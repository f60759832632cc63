"""What a head is trained to do: say what the trunk says, over the draft vocabulary, and land where its states land."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mtplx_core.forge.lessons import Batch


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


def draft_loss(predicted: mx.array, batch: Batch, table: DraftTable, *, weights: mx.array, sharpness: float) -> mx.array:
    """Cross-entropy of the head's distribution against the trunk's TOP tokens, a weighted mean over pairs.

    Tokens outside the draft vocabulary are left out of both sides.

    Args:
        predicted: the head's output, (rows, positions, hidden).
        weights: (rows, positions)
        sharpness: share of the trunk's whole mass that is moved onto its likeliest token.
    """
    slots = table.slots[batch.top_ids]  # (rows, positions, TOP)
    mass = mx.exp(batch.top_logprobs) * (1 - sharpness)
    mass = mx.concatenate([mass[..., :1] + sharpness, mass[..., 1:]], axis=-1)
    mass = mx.where(slots >= 0, mass, 0.0)
    # Expected unembedding: the same as gathering from the logits, without a scatter on the way back.
    expected = (mass[..., None, :] @ table.rows[mx.maximum(slots, 0)]).squeeze(-2)
    logits = predicted.reshape(-1, predicted.shape[-1]) @ table.rows.T
    normaliser = mx.logsumexp(logits, axis=-1).reshape(weights.shape)
    losses = mass.sum(axis=-1) * normaliser - (expected * predicted).sum(axis=-1)
    return (losses * weights).sum() / mx.maximum(weights.sum(), 1.0)


def state_loss(predicted: mx.array, batch: Batch, *, weights: mx.array) -> mx.array:
    """Smooth L1 between the head's output and the trunk's next hidden state, a weighted mean over pairs."""
    gap = mx.abs(predicted - batch.hidden[:, 1:])
    smooth = mx.where(gap < 1, 0.5 * gap * gap, gap - 0.5).mean(axis=-1)
    return (smooth * weights).sum() / mx.maximum(weights.sum(), 1.0)
