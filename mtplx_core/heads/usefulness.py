"""Refuses a head that does not fit its trunk: a wrong norm or layout raises nothing, it only drafts nonsense."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mtplx_core.errors import ModelLoadError
from mtplx_core.heads.base import Head
from mtplx_core.models.trunk import Trunk

FLOOR = 0.05
"""A head made for its trunk agrees on a quarter or more of any text; a mistaken one on next to nothing."""
_ROWS, _START_TOKENS, _SAID_TOKENS = 4, 2, 16
"""Several short texts at once: a step of four rows costs much less than four steps."""


def require_useful_head(trunk: Trunk, head: Head, *, floor: float = FLOOR, text: mx.array | None = None) -> float:
    """How often the head drafts what the trunk says next, on text the trunk makes up.

    Args:
        text: what `own_text` gave before.

    Raises:
        ModelLoadError: less often than `floor`.
    """
    agreement = measure_agreement(trunk, head, own_text(trunk) if text is None else text)
    if agreement < floor:
        raise ModelLoadError(
            f"head {head.name} drafts {agreement:.1%} of a built-in text right, at least {floor:.0%} is needed; "
            "it does not belong to this model or is laid out differently"
        )
    return agreement


def measure_agreement(trunk: Trunk, head: Head, tokens: mx.array) -> float:
    """Share of the trunk's greedy choices that the head's greedy drafts hit.

    Args:
        tokens: (rows, tokens); the choices behind the second of each row and later ones count.
    """
    hidden = trunk.hidden(tokens)
    said = mx.argmax(trunk.logits(hidden), axis=-1)  # (rows, tokens): the choice behind each
    drafted = head.logits(head(hidden[:, :-1], tokens[:, 1:]))
    guessed = mx.take(head.draft_ids, mx.argmax(drafted, axis=-1))
    agreement: Any = mx.mean(guessed == said[:, 1:]).item()
    return float(agreement)


def own_text(trunk: Trunk) -> mx.array:
    """Greedy texts (rows, tokens) from starts spread over the vocabulary, so that no tokenizer is needed."""
    stride = trunk.vocab_size // (_ROWS * _START_TOKENS)
    fed = (1 + stride * mx.arange(_ROWS * _START_TOKENS, dtype=mx.int32)).reshape(_ROWS, _START_TOKENS)
    caches, told = trunk.new_caches(), [fed]
    for _ in range(_SAID_TOKENS):
        logits = trunk.logits(mx.contiguous(trunk.hidden(fed, caches)[:, -1:]))
        fed = mx.argmax(logits, axis=-1).astype(mx.int32)
        told.append(fed)
        mx.eval(fed)
    return mx.concatenate(told, axis=1)
