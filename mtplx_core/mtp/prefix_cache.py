"""Keys and values of first messages, such as a system prompt, for the prompts that begin alike.

A prompt of several messages is fed up to the end of its first one at once, whether that is kept here or not. So what is
kept is what feeding it again would give, bit for bit where no other prompt shared its forward.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mtplx_core.caches.windowed import copy_rotating

KEPT = 4
_LEAST_TOKENS = 8
"""Shorter ones are fed faster than they are looked for."""


class CachedPrefix(NamedTuple):
    """What feeding a first message left behind."""

    caches: Sequence[Any]
    """mlx-lm's, one per layer of the trunk."""
    head_caches: Sequence[Any]
    last_hidden: mx.array | None

    def copy_into(self, caches: Sequence[Any], head_caches: Sequence[Any]) -> None:
        """Fill fresh caches; writing to them leaves this one as it is."""
        for kept, fresh in zip([*self.caches, *self.head_caches], [*caches, *head_caches], strict=True):
            _copy(kept, fresh)


class PrefixCache:
    """The last few first messages."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, ...], CachedPrefix] = OrderedDict()

    def find(self, tokens: tuple[int, ...]) -> CachedPrefix | None:
        """What was kept of exactly these tokens."""
        found = self._kept.get(tokens)
        if found is not None:
            self._kept.move_to_end(tokens)
        return found

    def keep(self, tokens: tuple[int, ...], beginning: CachedPrefix) -> None:
        """Keep one, and drop the one that was of no use for longest."""
        self._kept[tokens] = beginning
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        self._kept.clear()


def first_message(prompt: Sequence[int], ends: Collection[int], *, most: int) -> int:
    """Tokens of a prompt's first message, its end included; 0 where it is the only one, or not worth keeping.

    Args:
        ends: tokens that end a turn.
        most: tokens a beginning may have.
    """
    places = (place for place, token in enumerate(prompt) if token in ends)
    end = next(places, -1) + 1
    return end if _LEAST_TOKENS <= end <= most and next(places, None) is not None else 0


def _copy(kept: Any, fresh: Any) -> None:
    if isinstance(kept, KVCache):
        # Of the exact length, so that whoever goes on grows into arrays of its own.
        keys, values = kept.keys_and_values() if kept.offset else (None, None)  # type: ignore[no-untyped-call]
        fresh.state = keys, values, kept.offset
    elif isinstance(kept, RotatingKVCache):
        copy_rotating(kept, fresh)
    else:
        arrays, *rest = kept.state
        fresh.state = (list(arrays), *rest)
