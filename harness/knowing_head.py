"""A head for tests of engines that is always right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from harness.models import VOCAB_SIZE
from mtplx_core.models.loader import LoadedModel


class KnowingHead:
    """Drafts from finished answers by the pair's place and token, and fails on a pair out of place.

    Its one layer caches positions as keys, so that offsets, feeding and rejection of the real bookkeeping are used.
    """

    name = "knowing"
    max_depth = 3
    cached_layers = 1

    def __init__(self, loaded: LoadedModel, answers: Sequence[tuple[tuple[int, ...], list[int]]]) -> None:
        self.draft_ids = mx.arange(VOCAB_SIZE, dtype=mx.int32)
        self._next: dict[tuple[int, int, int], int] = {}
        for prompt, answer in answers:
            sequence = [*prompt, *answer, 0, 0, 0, 0]
            for place in range(len(sequence) - 2):
                self._next[len(prompt), place, sequence[place + 1]] = sequence[place + 2]

    def __call__(
        self, hidden: mx.array, tokens: mx.array, cache: list[Any] | None = None, mask: Any = "causal"
    ) -> mx.array:
        assert cache is not None
        rows, positions = tokens.shape
        offset: Any = cache[0].offset
        offset = offset if isinstance(offset, mx.array) else mx.full((rows,), offset)
        at = offset[:, None] + mx.arange(positions)
        entry = mx.broadcast_to(at[:, None, :, None].astype(mx.float32), (rows, 1, positions, 2))
        cache[0].update_and_fetch(entry, entry)
        return mx.stack([at.astype(mx.float32), tokens.astype(mx.float32)], axis=-1)

    def logits(self, hidden: mx.array) -> mx.array:
        places: Any = hidden[:, 0].tolist()
        logits = mx.zeros((len(places), 1, VOCAB_SIZE))
        for row, (place, token) in enumerate(places):
            known = {after for (_, at, seen), after in self._next.items() if (at, seen) == (int(place), int(token))}
            for after in known:
                logits[row, 0, after] = 1.0
        return logits
