"""A head for tests of engines that is often right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np


class Foreseeing:
    """Drafts what serial said, every third time something else, so that rows accept different numbers of drafts."""

    name = "foreseeing"
    max_depth = 3
    cached_layers = 1

    def __init__(
        self, vocab_size: int, hidden_size: int, answers: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> None:
        self._hidden_size = hidden_size
        self.draft_ids = mx.arange(vocab_size, dtype=mx.int32)
        longest = max(len(prompt) + len(answer) for prompt, answer in answers) + 8
        self._next = np.zeros((longest, vocab_size), np.int32)
        for prompt, answer in answers:
            sequence = [*prompt, *answer]
            for place in range(len(sequence) - 2):
                if (place + sequence[place + 1]) % 3:
                    self._next[place, sequence[place + 1]] = sequence[place + 2]

    def __call__(
        self, hidden: mx.array, tokens: mx.array, cache: list[Any] | None = None, mask: Any = "causal"
    ) -> mx.array:
        assert cache is not None
        rows, positions = tokens.shape
        offset = cache[0].offset if isinstance(cache[0].offset, mx.array) else mx.full((rows,), cache[0].offset)
        at = offset[:, None] + mx.arange(positions)
        entry = mx.broadcast_to(at[:, None, :, None].astype(mx.float32), (rows, 1, positions, 2))
        cache[0].update_and_fetch(entry, entry)
        known = mx.array(self._next)[mx.minimum(at, len(self._next) - 1), tokens]
        return mx.broadcast_to(known[:, :, None].astype(mx.float32), (rows, positions, self._hidden_size))

    def logits(self, hidden: mx.array) -> mx.array:
        return 100.0 * (hidden[..., :1] == mx.arange(self.draft_ids.size))
