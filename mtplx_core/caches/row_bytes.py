"""How much memory a row's cache takes in one of mlx-lm's models, read off the shapes of forwards that never run."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

STEP_TOKENS = 256
"""mlx-lm's caches grow in steps of this many tokens."""
CHUNK_TOKENS = 512
"""Prompt tokens that are usually fed at once."""


class WindowBytes(NamedTuple):
    """The part of a row's cache that grows with its length up to a bound."""

    per_token: int
    most_tokens: int


class CacheBytes(NamedTuple):
    """A row's cache: a part that grows with its length, one that does not (recurrent state), and sliding windows."""

    per_token: int
    fixed: int
    windows: tuple[WindowBytes, ...] = ()

    def of(self, tokens: int) -> int:
        held = -(-tokens // STEP_TOKENS) * STEP_TOKENS
        windows = sum(window.per_token * min(held, window.most_tokens) for window in self.windows)
        return self.fixed + self.per_token * held + windows


def cache_bytes(model: Any, *, chunk_tokens: int = CHUNK_TOKENS) -> CacheBytes:
    """Measure `model`.

    Args:
        chunk_tokens: prompt tokens fed at once; mlx-lm's caches keep them beside the window until the next forward.
    """
    one, two = (_filled(model, steps * STEP_TOKENS) for steps in (1, 2))
    per_token = fixed = 0
    windows = []
    for shorter, longer in zip(one, two, strict=True):
        growth = (longer.nbytes - shorter.nbytes) // STEP_TOKENS
        fixed += shorter.nbytes - growth * STEP_TOKENS
        if isinstance(longer, RotatingKVCache):
            windows.append(WindowBytes(growth, longer.max_size + chunk_tokens))
        else:
            per_token += growth
    return CacheBytes(per_token, fixed, tuple(windows))


def _filled(model: Any, tokens: int) -> list[Any]:
    """Caches of a row of so many tokens, not evaluated."""
    caches: Any = make_prompt_cache(model)
    model(mx.zeros((1, tokens), mx.int32), cache=caches)
    return list(caches)
