"""Feeds the prompts of rows on their way into the batch: a chunk of a long one, or several short ones together.

A forward reads all weights however few tokens it is over, so short prompts that come at once are fed in one. Where a
chunk ends depends on its prompt alone all the same. How much is fed at a time is the caller's business.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mtplx_core.caches.ragged import RaggedCache
from mtplx_core.caches.ragged_layer import LayerShape
from mtplx_core.engine import PrefillProgress, Row, RowEnd
from mtplx_core.heads.base import Head
from mtplx_core.models.trunk import Trunk
from mtplx_core.mtp.device_batch import mask_heads, trunk_shapes
from mtplx_core.mtp.prefill import Prefill
from mtplx_core.mtp.prefix_cache import PrefixCache, first_message

logger = logging.getLogger(__name__)

OLDEST_EVERY = 5
"""One of so many forwards goes to the prompt that has waited longest."""


@dataclass(slots=True)
class PrefillRound:
    """What one round of feeding did."""

    progress: list[PrefillProgress] = field(default_factory=list)
    ends: list[RowEnd] = field(default_factory=list)
    """Rows whose prefill failed."""
    tokens: int = 0
    shared: int = 0
    """Tokens taken over from another prompt's beginning."""


class PrefillOrder:
    """Which of the waiting prompts is fed next: the one with the fewest tokens left, and now and then the oldest.

    So a long prompt holds a short one up for one forward in `OLDEST_EVERY` and the one under way, and is itself fed in
    at least one of so many, however many short ones come. Offline rows are fed when no other row waits.
    """

    def __init__(self) -> None:
        self._since_oldest = 0
        """Forwards since the oldest had one."""

    def sort(self, waiting: Sequence[Prefill]) -> list[Prefill]:
        """Sort prefills, given in the order in which they came, into the order in which they are to be fed."""
        order = sorted(waiting, key=lambda prefill: (prefill.row.is_offline, prefill.total - prefill.done))
        if self._since_oldest >= OLDEST_EVERY - 1 and (oldest := _oldest(waiting)) is not None:
            order.remove(oldest)
            order.insert(0, oldest)
        return order

    def count(self, waiting: Sequence[Prefill], fed: Collection[Prefill]) -> None:
        """Take in that a forward over some of those waiting is about to be fed."""
        self._since_oldest = 0 if _oldest(waiting) in fed else self._since_oldest + 1


def _oldest(waiting: Sequence[Prefill]) -> Prefill | None:
    """The first that came of the rows that are not offline, or of all where each one is."""
    under_way = [prefill for prefill in waiting if not prefill.is_done]
    return next((prefill for prefill in under_way if not prefill.row.is_offline), under_way[0] if under_way else None)


class PrefillBatcher:
    """Makes prefills, and feeds them.

    Args:
        trunk: the model.
        head: fed along with it.
        chunk_tokens: of one row in one forward, at most.
        ends: tokens that end a turn.
    """

    def __init__(self, trunk: Trunk, head: Head | None, *, chunk_tokens: int, ends: Collection[int]) -> None:
        self.chunk_tokens = chunk_tokens
        self._trunk = trunk
        self._head = head
        self._ends = ends
        self._order = PrefillOrder()
        self._beginnings = PrefixCache()
        self._shapes = trunk_shapes(trunk)
        # A state must never see another row's padding.
        self._may_feed_together = all(isinstance(shape, LayerShape) for shape in self._shapes)

    def prefill_of(self, row: Row) -> Prefill:
        """The row at its start."""
        return Prefill(
            self._trunk,
            self._head,
            row,
            chunk_tokens=self.chunk_tokens,
            beginning=first_message(row.prompt, self._ends, most=self.chunk_tokens),
            beginnings=self._beginnings,
        )

    def feed(self, waiting: Sequence[Prefill], *, most: int) -> PrefillRound:
        """Feed chunks while they come to at most `most` tokens, but one in any case.

        Args:
            waiting: in the order in which they came.
            most: tokens, padding included.
        """
        fed, left = PrefillRound(), most
        while group := self._next_group(self._order.sort(waiting), fed, left, is_first=left == most):
            self._order.count(waiting, group)
            left -= len(group) * _longest(group)
            self._feed(group, fed)
        return fed

    def clear(self) -> None:
        """Let go of what is kept for later prompts."""
        self._beginnings.clear()

    def _next_group(self, waiting: Sequence[Prefill], fed: PrefillRound, left: int, *, is_first: bool) -> list[Prefill]:
        """Rows for one forward; of those that begin alike one goes ahead, and the others take over from it."""
        group: list[Prefill] = []
        failed, beginnings = {end.row_id for end in fed.ends}, set()
        for prefill in waiting:
            if taken := prefill.take_beginning():
                fed.shared += taken
                fed.progress.append(prefill.progress)
            if prefill.is_done or prefill.row.row_id in failed or prefill.begins_with in beginnings:
                continue
            is_room = (len(group) + 1) * _longest([*group, prefill]) <= left
            is_alone = not self._goes_with_others(prefill)
            if group and (is_alone or not is_room) or not (is_room or is_first):
                break
            group.append(prefill)
            if is_alone:
                break
            if prefill.begins_with is not None:
                beginnings.add(prefill.begins_with)
        return group

    def _goes_with_others(self, prefill: Prefill) -> bool:
        """Not where its forward is busy with it alone, nor where what it has would have to be copied far."""
        tokens = prefill.next_tokens
        is_short = tokens < self.chunk_tokens and prefill.done + tokens <= 2 * self.chunk_tokens
        return is_short and self._may_feed_together

    def _feed(self, group: Sequence[Prefill], fed: PrefillRound) -> None:
        try:
            tokens = self._feed_together(group) if len(group) > 1 else group[0].feed()
        except RuntimeError as error:  # what MLX raises when memory runs out, among others
            if len(group) > 1:
                for prefill in group:
                    self._feed([prefill], fed)
                return
            row_id = group[0].row.row_id
            logger.warning("prefill failed", extra={"request_id": row_id}, exc_info=True)
            fed.ends.append(RowEnd(row_id, "error", f"prefill failed: {error}"))
            return
        fed.tokens += tokens
        fed.progress += [prefill.progress for prefill in group]

    def _feed_together(self, group: Sequence[Prefill]) -> int:
        """One forward over the next chunk of each; shorter ones are padded behind, where no token of theirs looks."""
        positions = _longest(group)
        lengths = [prefill.done + positions for prefill in group]
        cache = RaggedCache(self._shapes, query_heads=mask_heads(self._trunk), max_positions=positions, growth=1)
        cache.reserve(len(group), max(lengths))
        for slot, prefill in enumerate(group):
            cache.insert(slot, prefill.caches)
        offset = mx.array([prefill.done for prefill in group], mx.int32)
        cache.begin(offset, positions, longest=max(lengths), lengths=lengths)
        chunks = [prefill.next_chunk for prefill in group]
        padded = [[*chunk, *[0] * (positions - len(chunk))] for chunk in chunks]
        hidden = self._trunk.hidden(mx.array(padded, mx.int32), cache.layers)
        for slot, (prefill, chunk) in enumerate(zip(group, chunks, strict=True)):
            prefill.take_fed(cache.lift(slot, prefill.done + len(chunk)), hidden[slot : slot + 1, : len(chunk)])
        return sum(map(len, chunks))


def _longest(group: Sequence[Prefill]) -> int:
    return max(prefill.next_tokens for prefill in group)
