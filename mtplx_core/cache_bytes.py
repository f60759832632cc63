"""How much memory a row's cache takes in one of mlx-lm's models, read off the shapes of forwards that never run."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

STEP_TOKENS = 256
"""mlx-lm's caches grow in steps of this many tokens."""


class CacheBytes(NamedTuple):
    """A row's cache: a part that grows with its length and a part that does not (recurrent state)."""

    per_token: int
    fixed: int

    def of(self, tokens: int) -> int:
        steps = -(-tokens // STEP_TOKENS)
        return self.fixed + self.per_token * steps * STEP_TOKENS


def cache_bytes(model: Any) -> CacheBytes:
    """Measure `model`. Bounded caches (sliding windows) count as growing, which is on the safe side."""
    one, two = (_lazy_cache_bytes(model, steps * STEP_TOKENS) for steps in (1, 2))
    per_token = (two - one) // STEP_TOKENS
    return CacheBytes(per_token, one - per_token * STEP_TOKENS)


def _lazy_cache_bytes(model: Any, tokens: int) -> int:
    cache: Any = make_prompt_cache(model)
    model(mx.zeros((1, tokens), mx.int32), cache=cache)
    return sum(layer.nbytes for layer in cache)
