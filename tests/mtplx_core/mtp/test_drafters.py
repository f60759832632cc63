"""Prompt lookup and the head's bookkeeping. Runs on arrays and a tiny random llama."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mtplx_core.caches.ragged import RaggedCache, plain_caches
from mtplx_core.caches.ragged_layer import LayerShape
from mtplx_core.mtp.drafters import PENDING_LIMIT, HeadDrafter, look_up
from mtplx_core.mtp.prompt_lookup import TokenIndex

CAPACITY = 24


def lookup(*rows: list[int], depth: int = 3) -> tuple[Any, Any]:
    """Look up in rows whose unused places hold a token that also stands in the rows, to be ignored."""
    padded = [row + [1] * (CAPACITY - len(row)) for row in rows]
    lengths = mx.array([len(row) for row in rows], mx.int32)
    tokens, found = look_up(mx.array(padded, mx.int32), lengths, depth)
    return tokens.tolist(), found.tolist()


def test_lookup_returns_what_followed_the_last_three_tokens() -> None:
    tokens, found = lookup([1, 2, 3, 7, 8, 9, 4, 1, 2, 3])

    assert found == [True]
    assert tokens == [[7, 8, 9]]


def test_lookup_prefers_a_match_of_three_to_a_later_one_of_two() -> None:
    tokens, _ = lookup([1, 2, 3, 7, 7, 7, 5, 2, 3, 8, 8, 8, 1, 2, 3])

    assert tokens == [[7, 7, 7]]


def test_lookup_prefers_the_latest_of_equal_matches() -> None:
    tokens, _ = lookup([2, 3, 7, 7, 7, 5, 2, 3, 8, 8, 8, 6, 2, 3])

    assert tokens == [[8, 8, 8]]


def test_lookup_takes_a_match_of_two_when_there_is_none_of_three() -> None:
    tokens, found = lookup([9, 2, 3, 7, 6, 5, 4, 2, 3])

    assert found == [True]
    assert tokens == [[7, 6, 5]]


def test_lookup_finds_nothing_without_an_earlier_match() -> None:
    _, found = lookup([1, 2, 3, 4, 5], [4], [4, 4])

    assert found == [False, False, False]


@pytest.mark.parametrize("seed", range(20))
def test_host_finds_what_the_device_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 6, size=60).tolist()
    recall = TokenIndex()

    for length in range(1, len(tokens) + 1):
        recall.extend(tokens[length - 1 : length])
        found: Any = look_up(mx.array([tokens], mx.int32), mx.array([length], mx.int32), 5)

        assert recall.guess(5) == (tuple(found[0][0].tolist()) if found[1].item() else None), tokens[:length]


def test_lookup_follows_a_loop_past_the_rows_end() -> None:
    tokens, found = lookup([5, 6, 7, 6, 7, 6], depth=5)

    assert found == [True]
    assert tokens == [[7, 6, 7, 6, 7]]


def test_lookup_follows_a_repeated_token() -> None:
    tokens, found = lookup([5, 4, 4, 4], depth=2)

    assert found == [True]
    assert tokens == [[4, 4]]


@pytest.mark.parametrize("rows", [1, 3])
def test_lookup_of_a_row_does_not_depend_on_the_others(rows: int) -> None:
    row = [1, 2, 3, 7, 8, 9, 4, 1, 2, 3]

    tokens, found = lookup(*[[3, 3, 3, 3]] * (rows - 1), row)

    assert found[-1]
    assert tokens[-1] == [7, 8, 9]


class Counting:
    """A head that notes how many positions each call is over."""

    name, max_depth, cached_layers = "counting", 3, 1
    draft_ids = mx.arange(8, dtype=mx.int32)

    def __init__(self) -> None:
        self.positions: list[int] = []

    def __call__(self, hidden: mx.array, tokens: mx.array, cache: Any = None, mask: Any = "causal") -> mx.array:
        self.positions.append(tokens.shape[1])
        return hidden

    def logits(self, hidden: mx.array) -> mx.array:
        return hidden


@pytest.mark.parametrize("most", [4, 1, 3])
def test_head_is_fed_no_more_than_the_longest_row_may_have_taken(most: int) -> None:
    head = Counting()
    cache = RaggedCache([LayerShape(1, 2, 2, mx.float32)], max_positions=PENDING_LIMIT + 4)
    cache.reserve(1, 64)
    drafter = HeadDrafter(head, cache, hidden_size=8, dtype=mx.float32, max_depth=3)
    drafter.seat(0, [filled()], mx.zeros((1, 1, 8)), 5)
    drafter.draft(lambda logits, drafts: mx.zeros((1,), mx.int32), 1, longest=4, parked=None)

    drafter.commit(mx.zeros((1, 4, 8)), mx.zeros((1, 4), mx.int32), mx.array([1], mx.int32), most=most)
    drafter.draft(lambda logits, drafts: mx.zeros((1,), mx.int32), 1, longest=8, parked=None)

    assert head.positions == [1, most]


def filled() -> Any:
    """A cache of one token."""
    cache: Any = plain_caches(1)[0]
    entry = mx.zeros((1, 1, 1, 2))
    cache.update_and_fetch(entry, entry)
    return cache
