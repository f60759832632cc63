"""The ragged cache against plain caches, row by row. Runs on random keys and values, no model."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtplx_core.caches.ragged import GROWTH_TOKENS, RaggedCache, plain_caches
from mtplx_core.caches.ragged_layer import LayerShape

SHAPE = LayerShape(heads=2, key_size=4, value_size=6, dtype=mx.float32)


def keys_and_values(rng: np.random.Generator, rows: int, positions: int) -> tuple[mx.array, mx.array]:
    keys = rng.normal(size=(rows, SHAPE.heads, positions, SHAPE.key_size)).astype(np.float32)
    values = rng.normal(size=(rows, SHAPE.heads, positions, SHAPE.value_size)).astype(np.float32)
    return mx.array(keys), mx.array(values)


def new_cache(*, rows: int, tokens: int = 64, positions: int = 4) -> RaggedCache:
    cache = RaggedCache([SHAPE], max_positions=positions)
    cache.reserve(rows, tokens)
    return cache


Step = tuple[list[int], list[bool], int]
STEPS = st.lists(
    st.integers(1, 4).flatmap(
        lambda positions: st.tuples(
            st.lists(st.integers(0, positions), min_size=3, max_size=3),
            st.lists(st.booleans(), min_size=3, max_size=3),
            st.just(positions),
        )
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=30, deadline=None)
@given(steps=STEPS, seed=st.integers(0, 2**32 - 1))
def test_rows_hold_what_plain_caches_hold_after_any_acceptance_and_parking(steps: list[Step], seed: int) -> None:
    rng = np.random.default_rng(seed)
    cache = new_cache(rows=3)
    kept: list[list[tuple[Any, Any]]] = [[], [], []]

    for accepted, is_parked, positions in steps:
        offset = mx.array([len(row) for row in kept], mx.int32)
        longest = max(map(len, kept)) + positions
        cache.begin(offset, positions, longest=longest, parked=mx.array(is_parked))
        keys, values = keys_and_values(rng, 3, positions)
        seen_keys, seen_values = cache.attention[0].update_and_fetch(keys, values)
        for row, count in enumerate(accepted):
            if not is_parked[row]:
                fresh_keys, fresh_values = np.array(keys[row]), np.array(values[row])
                # What was fed is seen at once, accepted or not.
                at = slice(len(kept[row]), len(kept[row]) + positions)
                assert (np.array(seen_keys[row, :, at]) == fresh_keys).all()
                assert (np.array(seen_values[row, :, at]) == fresh_values).all()
                kept[row] += [(fresh_keys[:, place], fresh_values[:, place]) for place in range(count)]

    for row, entries in enumerate(kept):
        for place, (key, value) in enumerate(entries):
            assert (np.array(cache.attention[0].keys[row, :, place]) == key).all()
            assert (np.array(cache.attention[0].values[row, :, place]) == value).all()
    cache.check()


def test_mask_shows_each_row_its_own_past_and_itself() -> None:
    cache = new_cache(rows=2)

    cache.begin(mx.array([3, 0], mx.int32), 2, longest=5)
    mask = np.array(cache.attention[0].make_mask(2))

    assert mask.shape == (2, 1, 2, 32)
    assert mask.sum(axis=-1).tolist() == [[[4, 5]], [[1, 2]]]
    assert mask[0, 0, 0, :4].all()


def test_mask_is_laid_out_by_query_head_for_the_fused_kernel() -> None:
    cache = RaggedCache([SHAPE], query_heads=6, max_positions=2)
    cache.reserve(2, 8)

    cache.begin(mx.array([1, 2], mx.int32), 2, longest=4)

    assert cache.attention[0].make_mask(2).shape == (2, 6, 2, 32)


@pytest.mark.parametrize(("longest", "positions", "rows"), [(10_000, 1, 2), (4, 9, 2), (4, 1, 3)])
def test_cache_refuses_a_window_beyond_its_bounds(longest: int, positions: int, rows: int) -> None:
    cache = new_cache(rows=2)

    with pytest.raises(ValueError, match="do not fit"):
        cache.begin(mx.zeros((rows,), mx.int32), positions, longest=longest)


def test_growing_keeps_what_is_there() -> None:
    cache = new_cache(rows=2)
    keys, values = keys_and_values(np.random.default_rng(0), 2, 3)
    cache.begin(mx.array([0, 5], mx.int32), 3, longest=8)
    cache.attention[0].update_and_fetch(keys, values)

    cache.reserve(5, GROWTH_TOKENS + 1)

    assert cache.capacity == 2 * GROWTH_TOKENS
    assert (cache.attention[0].keys[1, :, 5:8] == keys[1]).all()
    assert (cache.attention[0].values[0, :, :3] == values[0]).all()
    cache.check()


def test_insert_leaves_nothing_of_an_earlier_row_behind() -> None:
    cache = new_cache(rows=2)
    cache.attention[0].keys[1] = mx.nan
    cache.attention[0].values[1] = mx.nan
    plain = plain_caches(1)
    keys, values = keys_and_values(np.random.default_rng(0), 1, 3)
    plain[0].update_and_fetch(keys, values)  # type: ignore[no-untyped-call]  # mlx-lm carries no types

    cache.insert(1, plain)

    assert (cache.attention[0].keys[1, :, :3] == keys[0]).all()
    assert (cache.attention[0].keys[1, :, 3:] == 0).all()
    assert (cache.attention[0].values[1, :, 3:] == 0).all()


def test_insert_of_nothing_clears_the_slot() -> None:
    cache = new_cache(rows=1)
    cache.attention[0].values[0] = mx.nan

    cache.insert(0, plain_caches(1))

    assert (cache.attention[0].values == 0).all()


def test_move_copies_a_slot() -> None:
    cache = new_cache(rows=3)
    keys, values = keys_and_values(np.random.default_rng(0), 3, 2)
    cache.begin(mx.zeros((3,), mx.int32), 2, longest=2)
    cache.attention[0].update_and_fetch(keys, values)

    cache.move(2, 0)

    assert (cache.attention[0].keys[0, :, :2] == keys[2]).all()
    assert (cache.attention[0].values[1, :, :2] == values[1]).all()


def test_writing_fewer_rows_than_slots_leaves_the_others_alone() -> None:
    cache = new_cache(rows=4)
    keys, values = keys_and_values(np.random.default_rng(0), 2, 2)

    cache.begin(mx.array([0, 1], mx.int32), 2, longest=3)
    seen, _ = cache.attention[0].update_and_fetch(keys, values)

    assert seen.shape[0] == 2
    assert (cache.attention[0].keys[1, :, 1:3] == keys[1]).all()
    assert (cache.attention[0].keys[2:] == 0).all()


def test_release_frees_the_memory() -> None:
    cache = new_cache(rows=4)

    cache.release()

    assert cache.nbytes == 0
    assert cache.slots == 0


def test_attended_buckets_pad_by_less_than_a_quarter_once_long() -> None:
    cache = RaggedCache([SHAPE])

    assert [cache.attended_for(tokens) for tokens in (1, 32, 33, 257, 600, 2000)] == [32, 32, 64, 320, 640, 2048]
