"""The one interface of all MTP heads: pairs of (hidden state, next token) in, draft logits out."""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx


class Head(Protocol):
    """Predicts from the trunk's hidden state at t and the token at t + 1 the token at t + 2.

    The hidden state is the trunk's after its final norm. What `__call__` returns has passed the head's own norm: it
    goes into `logits`, and in place of the trunk's hidden state back into the head to draft one token further.
    """

    @property
    def name(self) -> str: ...

    @property
    def max_depth(self) -> int:
        """The most tokens it was made to draft in a row."""

    @property
    def draft_ids(self) -> mx.array:
        """Ascending token ids it can draft, (draft vocabulary,) int32."""

    @property
    def cached_layers(self) -> int:
        """How many key-value caches it needs."""

    def __call__(
        self, hidden: mx.array, tokens: mx.array, cache: list[Any] | None = None, mask: Any = "causal"
    ) -> mx.array:
        """Feed pairs: `hidden` (rows, positions, hidden), `tokens` (rows, positions) int32; returns hidden states.

        With a cache, its own `make_mask` decides what is seen and `mask` is not used.
        """

    def logits(self, hidden: mx.array) -> mx.array:
        """(rows, positions, draft vocabulary)"""
