"""One cycle: verify drafts in one trunk forward, accept what equals the plain choice, advance.

Where cycles overlap all of it stays on the device, and nothing is evaluated or read back. Where the host reads a cycle
before it starts the next it accepts and advances by itself, which costs the device nothing. What the model says, how a
token is chosen and where drafts come from is given from outside, so the whole of it also runs on small tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mtplx_core.sampling.sampler import Noise
from mtplx_core.sampling.slot_sampler import RowSampler


class RowState(NamedTuple):
    """Where each row stands on the device."""

    last: mx.array
    """Newest token, chosen but not yet fed, (rows,) int32."""
    offset: mx.array
    """Tokens fed, (rows,) int32."""
    position: mx.array
    """Tokens of the completion so far, (rows,) int32."""
    history: mx.array
    """Prompt and completion, `offset` + 1 of them meaningful, (rows, capacity) int32; no capacity, no history."""


class Cycle(NamedTuple):
    """What one cycle made of the rows, on the device."""

    state: RowState
    chosen: mx.array
    """The plain choice at every position, (rows, depth + 1) int32."""
    taken: mx.array
    """Tokens committed, (rows,) int32; 0 for parked rows."""


def run_cycle(
    state: RowState,
    drafts: mx.array,
    forward: Callable[[mx.array], mx.array],
    sampler: RowSampler,
    *,
    noise: Noise | None = None,
    parked: mx.array | None = None,
) -> Cycle:
    """Verify and commit.

    Args:
        state: where the rows stand.
        drafts: (rows, depth) int32, from anywhere.
        forward: from tokens (rows, depth + 1), each row's newest first, to logits (rows, depth + 1, vocabulary).
        sampler: chooses, and counts what is committed.
        noise: the sampler's, if it was made ahead.
        parked: rows that stay where they are, (rows,) bool.
    """
    chosen = verify(state, drafts, forward, sampler, noise=noise)
    accepted = count_accepted(drafts, chosen)
    taken = accepted + 1 if parked is None else mx.where(parked, 0, accepted + 1)
    sampler.commit(chosen, taken)
    return Cycle(_advanced(state, chosen, accepted, taken), chosen, taken)


def verify(
    state: RowState,
    drafts: mx.array,
    forward: Callable[[mx.array], mx.array],
    sampler: RowSampler,
    *,
    noise: Noise | None = None,
) -> mx.array:
    """The plain choice at every position, (rows, depth + 1) int32; see `run_cycle`."""
    newest = state.last[:, None]
    logits = forward(mx.concatenate([newest, drafts], axis=1) if drafts.shape[1] else newest)
    return sampler.choose(logits, state.position, drafts=drafts, noise=noise)


def count_accepted(drafts: mx.array, chosen: mx.array) -> mx.array:
    """Leading drafts (rows, depth) that equal what was chosen (rows, depth + 1) at their position; (rows,) int32."""
    if drafts.shape[1] == 0:
        return mx.zeros((drafts.shape[0],), mx.int32)
    equal = (drafts == chosen[:, :-1]).astype(mx.int32)
    return mx.cumprod(equal, axis=1).sum(axis=1)


def accepted_of(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """As `count_accepted`, of one row and on the host."""
    right = (draft == token for draft, token in zip(drafts, chosen, strict=False))
    return next((place for place, is_right in enumerate(right) if not is_right), len(drafts))


def advanced(state: RowState, chosen: Sequence[Sequence[int]], taken: Sequence[int]) -> RowState:
    """The state behind a cycle that the host has read, of which each row takes so many tokens; without a history."""
    last: Any = state.last.tolist()
    offset: Any = state.offset.tolist()
    position: Any = state.position.tolist()
    rows = zip(chosen, taken, last, strict=True)
    return RowState(
        mx.array([tokens[count - 1] if count else newest for tokens, count, newest in rows], mx.int32),
        mx.array([before + count for before, count in zip(offset, taken, strict=True)], mx.int32),
        mx.array([before + count for before, count in zip(position, taken, strict=True)], mx.int32),
        state.history,
    )


def empty_state(capacity: int) -> RowState:
    none = mx.zeros((0,), mx.int32)
    return RowState(none, none, none, mx.zeros((0, capacity), mx.int32))


def seated(state: RowState, slot: int, tokens: list[int], prompt_tokens: int) -> RowState:
    """The state with a row in `slot`: its last token waits to be fed, all before it are in the cache."""
    capacity = state.history.shape[1]
    history = mx.zeros((1, capacity), mx.int32)
    if capacity:
        history[0, : len(tokens)] = mx.array(tokens, mx.int32)
    fresh = RowState(
        mx.array([tokens[-1]], mx.int32),
        mx.array([len(tokens) - 1], mx.int32),
        mx.array([len(tokens) - prompt_tokens], mx.int32),
        history,
    )
    return placed(state, slot, fresh)


def placed(state: RowState, slot: int, row: RowState) -> RowState:
    """The state with the state of one row in `slot`, the one behind the last if need be."""
    if slot == state.last.shape[0]:
        return RowState(*(mx.concatenate([old, new]) for old, new in zip(state, row, strict=True)))
    return RowState(*(_with_row(old, slot, new) for old, new in zip(state, row, strict=True)))


def picked(state: RowState, slots: list[int]) -> RowState:
    """The state of some slots, in that order."""
    order = mx.array(slots, mx.int32)
    return RowState(*(mx.take(part, order, axis=0) for part in state))


def _with_row(array: mx.array, slot: int, row: mx.array) -> mx.array:
    return mx.concatenate([array[:slot], row, array[slot + 1 :]])


def _advanced(state: RowState, chosen: mx.array, accepted: mx.array, taken: mx.array) -> RowState:
    newest = mx.take_along_axis(chosen, accepted[:, None], axis=1)[:, 0]
    last = mx.where(taken > 0, newest, state.last)
    steps = mx.arange(1, chosen.shape[1] + 1, dtype=mx.int32)
    history = mx.put_along_axis(state.history, state.offset[:, None] + steps, chosen, axis=1)
    return RowState(last, state.offset + taken, state.position + taken, history)
