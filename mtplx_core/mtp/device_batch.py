"""All device state of the running rows: trunk cache, drafters, sampler, and where each row stands.

Builds the graph of one cycle and starts it. It knows slots and bounds but neither requests nor their ends, and never
waits for a cycle: where cycles run in turn, the host tells it what came of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module

from mtplx_core.caches.attention import route_attention
from mtplx_core.caches.ragged import RaggedCache, cache_arrays, layer_shapes, plain_caches
from mtplx_core.caches.ragged_layer import LayerShape
from mtplx_core.caches.recurrent import RecurrentShape
from mtplx_core.engine import Geometry, SamplingParams
from mtplx_core.heads.base import Head
from mtplx_core.models.memory import VERIFY_COPIES
from mtplx_core.models.trunk import Trunk
from mtplx_core.mtp.cycle import RowState, advanced, empty_state, picked, placed, run_cycle, seated, verify
from mtplx_core.mtp.drafters import PENDING_LIMIT, HeadDrafter, LiftedPairs, look_up
from mtplx_core.mtp.prefill import Prefill
from mtplx_core.sampling.logprobs import LogprobArrays, logprob_arrays
from mtplx_core.sampling.penalties import RowHistory
from mtplx_core.sampling.slot_sampler import RowSampler

CYCLES_AHEAD = 2
"""Cycles whose tokens may be written before the host learns that a row had ended."""


@dataclass(frozen=True, slots=True)
class CyclePlan:
    """What the host asks of one cycle."""

    depth: int
    lengths: tuple[int, ...]
    """Bound on the tokens each slot holds after it; 0 for those that take no part."""
    head_depth: int
    """How many of the drafts the head makes, in slots that do not draft by lookup."""
    by_lookup: frozenset[int] = frozenset()
    """Slots that draft what lookup finds, if it finds something."""
    parked: frozenset[int] = frozenset()
    """Slots that take no part."""
    guesses: Mapping[int, tuple[int, ...]] | None = None
    """What lookup finds by slot, `depth` tokens at least, where cycles run in turn; else the device looks."""
    top_logprobs: int | None = None
    """The most any row asks for; None when none asks."""
    is_timed: bool = False
    """Leave starting it to the caller, who evaluates it stage by stage."""

    @property
    def longest(self) -> int:
        return max(self.lengths)


class Started(NamedTuple):
    """A cycle on the device."""

    chosen: mx.array
    """The plain choice at every position, (rows, depth + 1) int32."""
    drafts: mx.array
    """(rows, depth) int32"""
    finite: mx.array
    """Whether all of a row's logits are, (rows,) bool."""
    guessed: mx.array | None
    """The first token that lookup found, -1 where it found nothing, (rows,) int32; None where the host looked."""
    logprobs: LogprobArrays | None
    stages: tuple[Any, ...]
    """What drafting, verifying and choosing end in, where the cycle is timed stage by stage."""


class _Guess(NamedTuple):
    """What lookup found."""

    tokens: mx.array
    """(rows, depth or else 1) int32"""
    found: mx.array
    """(rows,) bool"""
    is_drafted: mx.array
    """Where it is found and to be drafted, (rows,) bool."""


class _Unsettled(NamedTuple):
    """A cycle in turn of which the host has not said what the rows took."""

    hidden: mx.array
    chosen: mx.array


class LiftedRow(NamedTuple):
    """Everything the device has of one row that is out of the batch."""

    tokens: int
    """Bound on the tokens in its cache."""
    caches: Sequence[Any]
    """mlx-lm's, one per layer."""
    state: RowState
    sampling: SamplingParams
    history: RowHistory | None
    pairs: LiftedPairs | None

    @property
    def nbytes(self) -> int:
        caches = [*self.caches, *(self.pairs.caches if self.pairs else ())]
        return sum(int(cache.nbytes) for cache in caches)


class DeviceBatch:
    """Rows of different lengths on the device.

    Args:
        trunk: the model.
        geometry: the lane's bounds.
        head: drafts where prompt lookup finds nothing; None leaves it at lookup.
        overlaps: a cycle is started while another runs, so everything about it stays on the device. Else they run in
            turn: the host looks drafts up, reads a cycle, and settles it before the next. None: on a GPU.
    """

    def __init__(
        self, trunk: Trunk, geometry: Geometry, head: Head | None = None, *, overlaps: bool | None = None
    ) -> None:
        self.trunk = trunk
        self.head = head if geometry.depth else None
        self._geometry = geometry
        self._cache = new_trunk_cache(trunk, max_positions=geometry.depth + 1)
        self._drafter = new_head_drafter(trunk, self.head, max_depth=geometry.depth) if self.head is not None else None
        self.overlaps = mx.default_device() == mx.Device(mx.gpu) if overlaps is None else overlaps
        longest = geometry.max_context_tokens + (CYCLES_AHEAD + 1) * (geometry.depth + 1)
        self._history_tokens = longest if self.overlaps else 0
        self._state = empty_state(self._history_tokens)
        self._sampler = RowSampler(vocab_size=trunk.vocab_size)
        self._unsettled: _Unsettled | None = None

    @property
    def width(self) -> int:
        return int(self._state.last.shape[0])

    @property
    def arrays(self) -> list[mx.array]:
        """Everything a cycle leaves behind that the choice of its tokens does not already evaluate.

        The head's cache is among it: while the head does not draft no token depends on that cache, and unevaluated it
        would hold on to the hidden states of all cycles since.
        """
        states = [array for layer in self._cache.recurrent for array in layer.arrays]
        heads = [] if self._drafter is None else [*self._drafter.pending, *self._drafter.cache.arrays]
        return [*self._state, *self._sampler.arrays, *states, *heads]

    @property
    def kv_bytes(self) -> int:
        return self._cache.nbytes + (self._drafter.cache.nbytes if self._drafter else 0)

    def row_bytes(self, tokens: int) -> int:
        """Keys and values of one row, in the steps the caches grow by, its token history, and a cycle's work on it."""
        positions = self._geometry.depth + 1
        most = tokens + (CYCLES_AHEAD + 1) * positions
        total = self._cache.row_bytes(most)
        if self._drafter is not None:
            total += self._drafter.cache.row_bytes(most + PENDING_LIMIT)
        return total + 4 * self._history_tokens + 4 * VERIFY_COPIES * positions * self.trunk.vocab_size

    def seat(self, slot: int, prefill: Prefill) -> None:
        """Take a prefilled row into a slot, its own or the one behind the last."""
        self._reserve(max(slot + 1, self.width), prefill.total + 1)
        self._cache.insert(slot, prefill.caches)
        if self._drafter is not None:
            self._drafter.seat(slot, prefill.head_caches, prefill.last_hidden, prefill.tokens[-1])
        self._sampler.seat(slot, prefill.row)
        self._state = seated(self._state, slot, prefill.tokens, len(prefill.row.prompt))

    def lift(self, slot: int, *, longest: int) -> LiftedRow:
        """Copy a row of at most `longest` tokens out, as it stands behind the cycles started; its slot may be left."""
        caches = self._cache.lift(slot, longest)
        pairs = None if self._drafter is None else self._drafter.lift(slot, longest)
        row = LiftedRow(longest, caches, picked(self._state, [slot]), *self._sampler.lift(slot), pairs)
        heads = () if pairs is None else (pairs.pending, [cache.state for cache in pairs.caches if longest])
        # Left unevaluated, the copies would hold on to the whole batch.
        mx.async_eval((row.state, cache_arrays(caches), heads))  # type: ignore[no-untyped-call]  # mlx annotates only in part
        return row

    def put(self, slot: int, row: LiftedRow) -> None:
        """Put a row back into a slot, any free one or the one behind the last."""
        self._reserve(max(slot + 1, self.width), row.tokens + 1)
        self._cache.insert(slot, row.caches)
        if self._drafter is not None and row.pairs is not None:
            self._drafter.put(slot, row.pairs)
        self._sampler.put(slot, row.sampling, row.history)
        self._state = placed(self._state, slot, row.state)

    def close_holes(self, moves: Sequence[tuple[int, int]], *, width: int) -> None:
        """Follow the seats' moves, (source, target) each, and drop the slots behind `width`."""
        order = list(range(self.width))
        for source, target in moves:
            order[target] = source
            self._cache.move(source, target)
            if self._drafter is not None:
                self._drafter.cache.move(source, target)
        order = order[:width]
        self._state = picked(self._state, order)
        self._sampler.pick(order)
        if self._drafter is not None:
            self._drafter.pick(order)

    def release(self) -> None:
        """Drop all rows and their memory."""
        self.close_holes((), width=0)
        self._cache.release()
        if self._drafter is not None:
            self._drafter.cache.release()

    def start(self, plan: CyclePlan) -> Started:
        """Start one cycle over all slots; returns at once. In turn, `settle` has to follow before anything else."""
        self._reserve(self.width, plan.longest)
        parked = mx.array([slot in plan.parked for slot in range(self.width)]) if plan.parked else None
        before = self._state
        noise = self._sampler.noise(before.position, positions=plan.depth + 1)
        guess = self._look_up(plan)
        drafts = self._draft(plan, guess, parked)
        self._cache.begin(before.offset, plan.depth + 1, longest=plan.longest, parked=parked, lengths=plan.lengths)
        forward = _TrunkForward(self.trunk, self._cache)
        if self.overlaps:
            cycle = run_cycle(before, drafts, forward, self._sampler, noise=noise, parked=parked)
            self._state, chosen = cycle.state, cycle.chosen
            takes_one = plan.depth == 0 and not plan.parked
            self._commit(forward.hidden, chosen, cycle.taken, known=[1] * self.width if takes_one else None)
        else:
            chosen = verify(before, drafts, forward, self._sampler, noise=noise)
            self._unsettled = _Unsettled(forward.hidden, chosen)
        # Some families give tokens that stand for nothing a logit of minus infinity.
        finite = forward.logits.sum(axis=(1, 2)) < mx.inf
        guessed = mx.where(guess.found, guess.tokens[:, 0], -1) if guess is not None and self.overlaps else None
        logprobs = None
        if plan.top_logprobs is not None:
            logprobs = logprob_arrays(forward.logits, chosen, top=plan.top_logprobs)
        shown = (chosen, drafts, finite, guessed)
        rest = (shown, logprobs, self.arrays)
        if not plan.is_timed:
            mx.async_eval(rest)  # type: ignore[no-untyped-call]  # mlx annotates only in part
        # The logits of a whole vocabulary are not kept until they are read.
        return Started(*shown, logprobs, (drafts, forward.logits, rest) if plan.is_timed else ())

    def settle(self, chosen: Sequence[Sequence[int]], taken: Sequence[int]) -> None:
        """Advance the rows by what the host read of the last cycle in turn.

        Args:
            chosen: its choices by slot.
            taken: how many of them the row takes, by slot; 0 for parked ones.
        """
        assert self._unsettled is not None
        last, self._unsettled = self._unsettled, None
        counts = mx.array(list(taken), mx.int32)
        self._state = advanced(self._state, chosen, taken)
        self._sampler.commit(last.chosen, counts)
        self._commit(last.hidden, last.chosen, counts, known=taken)

    def check(self) -> None:
        """Raise if the caches disagree with their bookkeeping; for tests."""
        self._cache.check()
        if self._drafter is not None:
            self._drafter.cache.check()

    def _commit(self, hidden: mx.array, chosen: mx.array, taken: mx.array, *, known: Sequence[int] | None) -> None:
        """Take the verified positions in: `taken` of each row, which the host may know."""
        self._cache.commit(taken, known=known)
        if self._drafter is not None:
            self._drafter.commit(hidden, chosen, taken, most=chosen.shape[1] if known is None else max(known))

    def _look_up(self, plan: CyclePlan) -> _Guess | None:
        """None where nothing can be drafted from it.

        The device looks at depth 0 too: whether lookup would have been right is what tells when drafting pays again.
        """
        if not self._geometry.depth:
            return None
        depth = max(plan.depth, 1)
        if self.overlaps:
            tokens = min(self._cache.attended_for(plan.longest), self._history_tokens)
            guessed, found = look_up(self._state.history[:, :tokens], self._state.offset + 1, depth)
            return _Guess(guessed, found, found & mx.array([slot in plan.by_lookup for slot in range(self.width)]))
        used = {slot: guess for slot, guess in (plan.guesses or {}).items() if slot in plan.by_lookup}
        if not plan.depth or not used:
            return None
        tokens_by_slot = [used.get(slot, (0,) * depth)[:depth] for slot in range(self.width)]
        is_used = mx.array([slot in used for slot in range(self.width)])
        return _Guess(mx.array(tokens_by_slot, mx.int32), is_used, is_used)

    def _draft(self, plan: CyclePlan, guess: _Guess | None, parked: mx.array | None) -> mx.array:
        """(rows, depth) int32"""
        nothing = mx.zeros((self.width, plan.depth), mx.int32)
        guesses = nothing if guess is None else guess.tokens[:, : plan.depth]
        if self._drafter is None:
            return guesses
        if plan.head_depth == 0:
            self._drafter.feed_if_full(longest=plan.longest, parked=parked)
            return guesses
        drafts = self._drafter.draft(self._choose_draft, plan.head_depth, longest=plan.longest, parked=parked)
        if plan.head_depth < plan.depth:
            drafts = mx.concatenate([drafts, nothing[:, plan.head_depth :]], axis=1)
        return drafts if guess is None else mx.where(guess.is_drafted[:, None], guesses, drafts)

    def _choose_draft(self, logits: mx.array, drafts: mx.array) -> mx.array:
        assert self.head is not None
        starts = self._state.position + drafts.shape[1]
        return self._sampler.choose_draft(logits[:, 0], starts, vocabulary=self.head.draft_ids, drafts=drafts)

    def _reserve(self, slots: int, longest: int) -> None:
        """Slots double, so that joining rows seldom copy what is there."""
        if slots > self._cache.slots:
            slots = min(max(slots, 2 * self._cache.slots), self._geometry.decode_batch_max)
        self._cache.reserve(slots, longest)
        if self._drafter is not None:
            self._drafter.cache.reserve(slots, longest + PENDING_LIMIT + self._geometry.depth + 1)


class _TrunkForward:
    """The trunk over the batch's cache; keeps what the parts of a cycle behind the choice need."""

    def __init__(self, trunk: Trunk, cache: RaggedCache) -> None:
        self._trunk = trunk
        self._cache = cache
        self.hidden: mx.array
        self.logits: mx.array

    def __call__(self, tokens: mx.array) -> mx.array:
        self.hidden, logits = self._trunk.run(tokens, self._cache.layers)
        self.logits = logits.astype(mx.float32)
        return self.logits


def new_trunk_cache(trunk: Trunk, *, max_positions: int) -> RaggedCache:
    """An empty ragged cache for the trunk's layers."""
    return RaggedCache(trunk_shapes(trunk), query_heads=mask_heads(trunk), max_positions=max_positions)


def trunk_shapes(trunk: Trunk) -> list[LayerShape | RecurrentShape]:
    """What the trunk's layers keep."""
    probe = trunk.new_caches()
    trunk.hidden(mx.zeros((1, 1), mx.int32), probe)
    return layer_shapes(probe)


def new_head_drafter(trunk: Trunk, head: Head, *, max_depth: int) -> HeadDrafter:
    """A drafter with an empty ragged cache for the head's layers."""
    if isinstance(head, Module):
        route_attention(head)
    probe = plain_caches(head.cached_layers)
    head(mx.zeros((1, 1, trunk.hidden_size), trunk.dtype), mx.zeros((1, 1), mx.int32), probe)
    room = PENDING_LIMIT + max_depth + 1
    cache = RaggedCache(layer_shapes(probe), query_heads=mask_heads(trunk), max_positions=room)
    return HeadDrafter(head, cache, hidden_size=trunk.hidden_size, dtype=trunk.dtype, max_depth=max_depth)


def mask_heads(trunk: Trunk) -> int:
    """Heads to lay masks out for: a GPU's fused attention copies one that is shared between heads, in every layer."""
    return trunk.query_heads if mx.default_device() == mx.Device(mx.gpu) else 1
