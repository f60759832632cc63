"""Feeds one row's prompt to the trunk, and to the head, in chunks whose boundaries depend on the prompt alone.

A row is prefilled in caches of its own, of mlx-lm's plain kind: while it is fed here, neither its neighbours nor their
number touch its keys and values. Moving them into the batch, or a forward shared with other prompts, is not done here.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mtplx_core.caches.ragged import cache_arrays, plain_caches
from mtplx_core.engine import PrefillProgress, Row
from mtplx_core.heads.base import Head
from mtplx_core.models.trunk import Trunk
from mtplx_core.mtp.prefix_cache import CachedPrefix, PrefixCache


class Prefill:
    """One row on its way into the batch: all of its tokens are fed but the last, which the first cycle feeds.

    Args:
        trunk: the model.
        head: fed with every pair but the last, which the first draft needs.
        row: prompt and what is already committed.
        chunk_tokens: tokens fed at once.
        beginning: tokens of the prompt that are fed at once by themselves, no more than a chunk.
        beginnings: where such are kept.
    """

    def __init__(
        self,
        trunk: Trunk,
        head: Head | None,
        row: Row,
        *,
        chunk_tokens: int,
        beginning: int = 0,
        beginnings: PrefixCache | None = None,
    ) -> None:
        self.row = row
        self.tokens = [*row.prompt, *row.committed]
        self.total = len(self.tokens) - 1
        self.done = 0
        self.caches: list[Any] = trunk.new_caches()
        self.head_caches = plain_caches(head.cached_layers if head else 0)
        self.last_hidden: mx.array | None = None
        """Hidden state of the last token fed, (1, 1, hidden); None for a prompt of one token or without a head."""
        self._trunk = trunk
        self._head = head
        self._chunk = chunk_tokens
        self._beginning = beginning
        self._beginnings = beginnings
        self._ids = mx.array([self.tokens], mx.int32)

    @property
    def is_done(self) -> bool:
        return self.done == self.total

    @property
    def next_tokens(self) -> int:
        """Tokens the next `feed` feeds."""
        end = self._beginning if self.done < self._beginning else self.total
        return min(self._chunk, end - self.done)

    @property
    def next_chunk(self) -> list[int]:
        """The tokens that are fed next."""
        return self.tokens[self.done : self.done + self.next_tokens]

    @property
    def begins_with(self) -> tuple[int, ...] | None:
        """The beginning that is to be fed or taken over next; None where that is done, or it has none of its own."""
        return self._first_tokens if self._beginning and not self.done else None

    @property
    def progress(self) -> PrefillProgress:
        """The last token counts as done with the others, although the first cycle feeds it."""
        return PrefillProgress(self.row.row_id, self.done + self.is_done, self.total + 1)

    def take_beginning(self) -> int:
        """Take over what is kept of the prompt's beginning; returns its tokens."""
        if self._beginnings is None or self.done or not self._beginning:
            return 0
        kept = self._beginnings.find(self._first_tokens)
        if kept is None:
            return 0
        kept.copy_into(self.caches, self.head_caches)
        self.last_hidden = kept.last_hidden
        self.done = self._beginning
        return self.done

    def feed(self) -> int:
        """Start the next chunk on the device without waiting for it; returns its tokens."""
        ids = self._ids[:, self.done : self.done + self.next_tokens]
        return self.take_fed(self.caches, self._trunk.hidden(ids, self.caches))

    def take_fed(self, caches: list[Any], hidden: mx.array) -> int:
        """Take in what a forward over the next chunk left in `caches` and gave, (1, tokens, hidden); its tokens."""
        start, end = self.done, self.done + self.next_tokens
        self.caches = caches
        if self._head is not None:
            self._feed_head(hidden, start, end)
        self.done = end
        mx.async_eval(cache_arrays([*self.caches, *self.head_caches]), self.last_hidden)  # type: ignore[no-untyped-call]  # mlx annotates only in part
        if self._beginnings is not None and end == self._beginning:
            self._keep_beginning(self._beginnings)
        return end - start

    @property
    def _first_tokens(self) -> tuple[int, ...]:
        return tuple(self.tokens[: self._beginning])

    def _keep_beginning(self, beginnings: PrefixCache) -> None:
        caches, head_caches = self._trunk.new_caches(), plain_caches(len(self.head_caches))
        fed = CachedPrefix(self.caches, self.head_caches, self.last_hidden)
        fed.copy_into(caches, head_caches)
        beginnings.keep(self._first_tokens, CachedPrefix(caches, head_caches, self.last_hidden))

    def _feed_head(self, hidden: mx.array, start: int, end: int) -> None:
        """Pairs lag one behind: the last hidden state of a chunk is paired in the next one."""
        assert self._head is not None
        if self.last_hidden is not None:
            hidden = mx.concatenate([self.last_hidden, hidden], axis=1)
            start -= 1
        self.last_hidden = hidden[:, -1:]
        if hidden.shape[1] > 1:
            self._head(hidden[:, :-1], self._ids[:, start + 1 : end], self.head_caches)
