"""Refuses a head that does not fit its trunk: a wrong norm or layout raises nothing, it only drafts nonsense."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mtplx_core.errors import ModelLoadError
from mtplx_core.heads.base import Head
from mtplx_core.trunk import Trunk

FLOOR = 0.05
"""A head made for its trunk agrees on a quarter or more of any text; a mistaken one on next to nothing."""
_TEXT_TOKENS = 64
_START = 16


def require_useful_head(trunk: Trunk, head: Head, *, floor: float = FLOOR, text: Sequence[int] | None = None) -> float:
    """How often the head drafts what the trunk says next, on text the trunk makes up.

    Args:
        text: what the trunk made up before.

    Raises:
        ModelLoadError: less often than `floor`.
    """
    agreement = measure_agreement(trunk, head, text or own_text(trunk))
    if agreement < floor:
        raise ModelLoadError(
            f"head {head.name} drafts {agreement:.1%} of a built-in text right, at least {floor:.0%} is needed; "
            "it does not belong to this model or is laid out differently"
        )
    return agreement


def measure_agreement(trunk: Trunk, head: Head, tokens: Sequence[int]) -> float:
    """Share of `tokens` behind the second of which the head's greedy draft is the trunk's greedy choice."""
    ids = mx.array([list(tokens)], mx.int32)
    hidden = trunk.hidden(ids)
    said = mx.argmax(trunk.logits(hidden), axis=-1)  # (1, tokens): the choice behind each
    drafted = head.logits(head(hidden[:, :-1], ids[:, 1:]))
    guessed = mx.take(head.draft_ids, mx.argmax(drafted, axis=-1))
    agreement: Any = mx.mean(guessed == said[:, 1:]).item()
    return float(agreement)


def own_text(trunk: Trunk) -> list[int]:
    """Greedy text from a few starts spread over the vocabulary, so that no tokenizer is needed."""
    stride = trunk.vocab_size // _START
    start = [1 + place * stride for place in range(_START)]
    caches = trunk.new_caches()
    tokens = list(start)
    fed = mx.array([start], mx.int32)
    for _ in range(_TEXT_TOKENS):
        logits = trunk.logits(mx.contiguous(trunk.hidden(fed, caches)[:, -1:]))
        fed = mx.argmax(logits, axis=-1).astype(mx.int32)
        token: Any = fed.item()
        tokens.append(token)
    return tokens
