"""The cycle commits plain sampling's own tokens, whatever the drafts, depths and restarts. Runs on small tables."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mtplx_core.cycle import run_cycle
from tests.mtplx_core_mtp.tables import Tables, Tokens, plain_tokens, random_tables, restarted

TOKENS = 8
MAX_DEPTH = 4
BATCHES = [(12_000, False)] * 8 + [(2_000, True)] * 2
"""(tables, whether some have penalties, whose counts are kept row by row): 100,000 in all."""


def random_drafts(rng: np.random.Generator, plain: Tokens, positions: Tokens, *, depth: int, vocab: int) -> Tokens:
    """Half of the drafts are right, so that every number of accepted drafts comes up."""
    random = rng.integers(vocab, size=(len(plain), depth))
    at = np.minimum(positions[:, None] + np.arange(depth), TOKENS - 1)
    right = np.take_along_axis(plain, at, axis=1)
    return np.where(rng.random(random.shape) < 0.5, right, random).astype(np.int32)


def decode(rng: np.random.Generator, tables: Tables, plain: Tokens) -> list[list[int]]:
    """Decode by cycles of random depth, with rows parked and all taken over at random, until every row is full."""
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
        cycle = run_cycle(state, mx.array(drafts), tables.forward, sampler, parked=mx.array(parked))
        state = cycle.state
        chosen: Any = cycle.chosen.tolist()
        taken: Any = cycle.taken.tolist()
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
