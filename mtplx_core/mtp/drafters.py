"""Where drafts come from: prompt lookup over a row's own tokens, and the MTP head with its pairs and its cache.

Drafters only guess. Whatever they return, the cycle commits what plain sampling would have chosen, so nothing here
can make an answer wrong, only slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mtplx_core.caches.ragged import RaggedCache
from mtplx_core.heads.base import Head

PENDING_LIMIT = 16
"""Pairs a row may have waiting before the head is fed although nothing is drafted."""

DraftChoice = Callable[[mx.array, mx.array], mx.array]
"""From draft logits (rows, 1, draft vocabulary) and the drafts before (rows, drafts), token ids (rows,) int32."""


def look_up(history: mx.array, length: mx.array, depth: int) -> tuple[mx.array, mx.array]:
    """What followed the longest, then latest, earlier occurrence of each row's last tokens, 3 or else 2 of them.

    A continuation that runs past the row's end goes on with itself, so that loops are followed.

    Args:
        history: tokens, (rows, capacity) int32.
        length: how many of them count, (rows,) int32.
        depth: tokens wanted.

    Returns:
        Tokens (rows, depth) int32 and where they mean something, (rows,) bool.
    """
    capacity = history.shape[1]
    back = mx.arange(3, 0, -1, dtype=mx.int32)
    tail = mx.take_along_axis(history, mx.maximum(length[:, None] - back, 0), axis=1)  # (rows, 3)
    third = history == tail[:, 2:]
    second = history == tail[:, 1:2]
    first = history == tail[:, :1]
    # Position p holds a match that ends in p; it must end before the row's last token.
    ends = mx.arange(1, capacity, dtype=mx.int32)
    pair = third[:, 1:] & second[:, :-1] & (ends < length[:, None] - 1)
    triple = pair[:, 1:] & first[:, :-2] & (length[:, None] > 2)
    rank = mx.where(pair, ends, 0)
    rank = mx.concatenate([rank[:, :1], rank[:, 1:] + mx.where(triple, capacity, 0)], axis=1)
    best = rank.max(axis=1)
    found = best > 0
    start = best % capacity + 1  # behind the match
    period = mx.maximum(length - start, 1)
    steps = mx.arange(depth, dtype=mx.int32)
    tokens = mx.take_along_axis(history, start[:, None] + steps % period[:, None], axis=1)
    return tokens, found


class Pending(NamedTuple):
    """Pairs of (hidden state, token behind it) that the head has not seen."""

    hidden: mx.array
    """(rows, PENDING_LIMIT + positions, hidden)"""
    tokens: mx.array
    """(rows, PENDING_LIMIT + positions) int32"""
    length: mx.array
    """How many wait, (rows,) int32."""
    fed: mx.array
    """Pairs in the head's cache, (rows,) int32."""


class LiftedPairs(NamedTuple):
    """The head's side of a row that is out of the batch."""

    caches: Sequence[KVCache]
    pending: Pending
    """Of one row."""
    waiting: int
    """Host-side bound on `pending.length`."""


class HeadDrafter:
    """The head's side of the batch: its ragged cache and the pairs that wait for it.

    Args:
        head: the head.
        cache: a ragged cache for its layers, taking PENDING_LIMIT + 2 * `max_depth` positions.
        hidden_size: of the trunk.
        dtype: of the trunk's hidden states.
        max_depth: the most drafts of a cycle.
    """

    def __init__(self, head: Head, cache: RaggedCache, *, hidden_size: int, dtype: mx.Dtype, max_depth: int) -> None:
        self.head = head
        self.cache = cache
        self._room = PENDING_LIMIT + max_depth + 1
        none = mx.zeros((0,), mx.int32)
        self.pending = Pending(
            mx.zeros((0, self._room, hidden_size), dtype), mx.zeros((0, self._room), mx.int32), none, none
        )
        self._waiting = 0
        """Host-side bound on `pending.length`."""

    def seat(self, slot: int, layers: Sequence[KVCache], hidden: mx.array | None, token: int) -> None:
        """Take a prefilled row in: its head caches and the one pair that prefill left over."""
        fed = layers[0].offset
        self.cache.insert(slot, layers)
        old = self.pending
        row = mx.zeros((1, self._room, old.hidden.shape[2]), old.hidden.dtype)
        if hidden is not None:
            row[:, :1] = hidden
        tokens = mx.full((1, self._room), token, mx.int32)
        length = mx.array([0 if hidden is None else 1], mx.int32)
        self._place(slot, Pending(row, tokens, length, mx.array([fed], mx.int32)), waiting=1)

    def lift(self, slot: int, tokens: int) -> LiftedPairs:
        """Copies of what a slot has, of which at most `tokens` pairs are in the head's cache."""
        pending = Pending(*(part[slot : slot + 1] for part in self.pending))
        return LiftedPairs(self.cache.lift(slot, tokens), pending, self._waiting)

    def put(self, slot: int, lifted: LiftedPairs) -> None:
        """Put a row back into a slot."""
        self.cache.insert(slot, lifted.caches)
        self._place(slot, lifted.pending, waiting=lifted.waiting)

    def _place(self, slot: int, row: Pending, *, waiting: int) -> None:
        old = self.pending
        parts = [mx.concatenate([kept[:slot], new, kept[slot + 1 :]]) for kept, new in zip(old, row, strict=True)]
        self.pending = Pending(*parts)
        self._waiting = max(self._waiting, waiting)

    def pick(self, slots: list[int]) -> None:
        """Keep the pairs of some slots, in that order; their cache slots are moved by the caller."""
        order = mx.array(slots, mx.int32)
        self.pending = Pending(*(mx.take(part, order, axis=0) for part in self.pending))

    def draft(self, choose: DraftChoice, depth: int, *, longest: int, parked: mx.array | None) -> mx.array:
        """Feed what waits and draft (rows, depth) int32; `longest` bounds the rows' pairs, drafts included."""
        hidden = self._feed(longest=longest, parked=parked)
        drafts = mx.zeros((hidden.shape[0], 0), mx.int32)
        fed = self.pending.fed
        for ahead in range(depth):
            if ahead:
                self.cache.begin(fed + (ahead - 1), 1, longest=longest, parked=parked)
                hidden = self.head(hidden, drafts[:, -1:], self.cache.layers)
            chosen = choose(self.head.logits(hidden), drafts)
            drafts = mx.concatenate([drafts, chosen[:, None]], axis=1)
        return drafts

    def commit(self, hidden: mx.array, chosen: mx.array, taken: mx.array, *, most: int) -> None:
        """Let the pairs of a verified cycle wait: `hidden` (rows, positions, hidden), the first `taken` of each.

        `most` is a host-side bound on `taken`.
        """
        old = self.pending
        steps = mx.arange(chosen.shape[1], dtype=mx.int32)
        at = old.length[:, None] + steps
        self.pending = Pending(
            mx.put_along_axis(old.hidden, mx.broadcast_to(at[:, :, None], hidden.shape), hidden, axis=1),
            mx.put_along_axis(old.tokens, at, chosen, axis=1),
            old.length + taken,
            old.fed,
        )
        self._waiting += most

    def feed_if_full(self, *, longest: int, parked: mx.array | None) -> None:
        """Keep the waiting pairs bounded while nothing is drafted."""
        if self._waiting >= PENDING_LIMIT:
            self._feed(longest=longest, parked=parked)

    def _feed(self, *, longest: int, parked: mx.array | None) -> mx.array:
        """Feed all that waits; returns the head's hidden state of each row's last pair, (rows, 1, hidden)."""
        positions = max(self._waiting, 1)
        old = self.pending
        self.cache.begin(old.fed, positions, longest=longest + positions, parked=parked)
        fed = self.head(old.hidden[:, :positions], old.tokens[:, :positions], self.cache.layers)
        last = mx.maximum(old.length - 1, 0)[:, None, None]
        self.pending = old._replace(length=mx.zeros_like(old.length), fed=old.fed + old.length)
        self._waiting = 0
        return mx.take_along_axis(fed, mx.broadcast_to(last, (fed.shape[0], 1, fed.shape[2])), axis=1)
