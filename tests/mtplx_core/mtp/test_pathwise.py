"""The cycle commits plain sampling's own tokens, whatever the drafts, depths and restarts. Runs on small tables."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from mtplx_core.mtp.cycle import RowState, accepted_of, advanced, run_cycle, verify
from mtplx_core.sampling.slot_sampler import RowSampler
from tests.mtplx_core.mtp.tables import Tables, Tokens, plain_tokens, random_tables, restarted

TOKENS = 8
MAX_DEPTH = 4
BATCHES = [(3_000, False)] * 8 + [(1_000, True)] * 2
"""(tables, whether some have penalties, whose counts are kept row by row): 26,000 in all."""


def random_drafts(rng: np.random.Generator, plain: Tokens, positions: Tokens, *, depth: int, vocab: int) -> Tokens:
    """Half of the drafts are right, so that every number of accepted drafts comes up."""
    random = rng.integers(vocab, size=(len(plain), depth))
    at = np.minimum(positions[:, None] + np.arange(depth), TOKENS - 1)
    right = np.take_along_axis(plain, at, axis=1)
    return np.where(rng.random(random.shape) < 0.5, right, random).astype(np.int32)


def cycle_on_device(
    tables: Tables, state: RowState, sampler: RowSampler, drafts: Tokens, parked: NDArray[np.bool_]
) -> tuple[RowState, Any, Any]:
    """Behind it the state, what was chosen, and how much of it each row takes."""
    cycle = run_cycle(state, mx.array(drafts), tables.forward, sampler, parked=mx.array(parked))
    return cycle.state, cycle.chosen.tolist(), cycle.taken.tolist()


def cycle_in_turn(
    tables: Tables, state: RowState, sampler: RowSampler, drafts: Tokens, parked: NDArray[np.bool_]
) -> tuple[RowState, Any, Any]:
    """The same, read before the rows advance."""
    chosen = verify(state, mx.array(drafts), tables.forward, sampler)
    tokens: Any = chosen.tolist()
    rows = zip(drafts.tolist(), tokens, parked, strict=True)
    taken = [0 if is_parked else accepted_of(drafted, fresh) + 1 for drafted, fresh, is_parked in rows]
    sampler.commit(chosen, mx.array(taken, mx.int32))
    return advanced(state, tokens, taken), tokens, taken


def decode(rng: np.random.Generator, tables: Tables, plain: Tokens) -> list[list[int]]:
    """Cycles of either kind and random depth, rows parked and all taken over at random, until every row is full."""
    committed: list[list[int]] = [[] for _ in tables.rows]
    capacity = 4 + TOKENS + 2 * (MAX_DEPTH + 1)
    state, sampler = restarted(tables, committed, capacity=capacity)
    while min(map(len, committed)) < TOKENS:
        if rng.random() < 0.15:
            committed = [tokens[:TOKENS] for tokens in committed]
            state, sampler = restarted(tables, committed, capacity=capacity)
        depth = int(rng.integers(MAX_DEPTH + 1))
        positions = np.array([len(tokens) for tokens in committed], np.int32)
        parked = (positions >= TOKENS) | (rng.random(len(positions)) < 0.1)
        drafts = random_drafts(rng, plain, positions, depth=depth, vocab=tables.vocab_size)
        cycle = cycle_in_turn if rng.random() < 0.5 else cycle_on_device
        state, chosen, taken = cycle(tables, state, sampler, drafts, parked)
        for tokens, fresh, count in zip(committed, chosen, taken, strict=True):
            tokens += fresh[:count]
    return [tokens[:TOKENS] for tokens in committed]


@pytest.mark.parametrize(("batch", "rows", "has_penalties"), [(i, *kind) for i, kind in enumerate(BATCHES)])
def test_cycle_commits_the_plain_samplers_tokens_for_any_draft_depth_and_restart(
    batch: int, rows: int, has_penalties: bool
) -> None:
    rng = np.random.default_rng(batch)
    tables = random_tables(rng, rows=rows, vocab_size=3 + batch % 3, max_tokens=TOKENS, has_penalties=has_penalties)
    plain = plain_tokens(tables, count=TOKENS)

    committed = decode(rng, tables, plain)

    assert (np.array(committed) == plain).all()
