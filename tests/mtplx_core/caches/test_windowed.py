"""Rings of keys and values against plain lists of them, row by row. Runs on numbered keys, no model."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import RotatingKVCache

from mtplx_core.caches.ragged import RaggedCache
from mtplx_core.caches.ragged_layer import LayerShape
from mtplx_core.caches.windowed import copy_rotating, in_order
from mtplx_core.errors import EngineError

WINDOW, POSITIONS, ROWS = 5, 4, 3
RING = WINDOW + POSITIONS - 1
SHAPE = LayerShape(heads=2, key_size=4, value_size=6, dtype=mx.float32, window=WINDOW)
FULL = SHAPE._replace(window=None)


def new_cache(*shapes: LayerShape, rows: int = ROWS, tokens: int = 1, positions: int = POSITIONS) -> RaggedCache:
    """A cache whose rings are as short as they may be."""
    cache = RaggedCache(shapes or [SHAPE], max_positions=positions, bucket=1, growth=1)
    cache.reserve(rows, tokens)
    return cache


def numbered(numbers: Any) -> tuple[mx.array, mx.array]:
    """Keys and values for (rows, positions) numbers, which they carry."""
    column = mx.array(np.asarray(numbers, np.float32))[:, None, :, None]
    shape = (column.shape[0], SHAPE.heads, column.shape[2])
    return mx.broadcast_to(column, (*shape, SHAPE.key_size)), mx.broadcast_to(-column, (*shape, SHAPE.value_size))


def seen_by(keys: mx.array, values: mx.array, mask: mx.array, row: int, position: int) -> list[int]:
    """The numbers that a position sees."""
    shown = np.array(mask[row, 0, position])
    assert (np.array(keys[row, 1, :, 3]) == -np.array(values[row, 0, :, 5])).all()
    return sorted(np.array(keys[row, 0, :, 0])[shown].astype(int).tolist())


class Rows:
    """Rows in a cache, beside the numbers each of them holds."""

    def __init__(self, cache: RaggedCache) -> None:
        self.cache = cache
        self.kept: list[list[int]] = [[] for _ in range(ROWS)]
        self._fed = 0

    def feed(self, positions: int, accepted: list[int], parked: list[bool]) -> None:
        """One forward, in which every position must see its window of what its row holds."""
        offset = mx.array([len(row) for row in self.kept], mx.int32)
        active = [len(row) for row, is_parked in zip(self.kept, parked, strict=True) if not is_parked]
        longest = max(active, default=0) + positions
        self.cache.reserve(ROWS, longest)
        self.cache.begin(offset, positions, longest=longest, parked=mx.array(parked))
        fresh = self._fed + np.arange(1, ROWS * positions + 1).reshape(ROWS, positions)
        self._fed += fresh.size
        layer = self.cache.attention[0]
        mask = layer.make_mask(positions, window_size=WINDOW)
        keys, values = layer.update_and_fetch(*numbered(fresh))
        for row, count in enumerate(accepted):
            for position in range(positions):
                if parked[row]:
                    assert mask[row, 0, position].any().item(), "no key at all would give a NaN"
                    continue
                held = [*self.kept[row], *fresh[row, : position + 1].tolist()]
                assert seen_by(keys, values, mask, row, position) == held[-WINDOW:]
            if not parked[row]:
                self.kept[row] += fresh[row, :count].tolist()

    def put_aside(self, row: int, slack: int) -> None:
        """Take a row out, knowing its length only roughly, and put it back."""
        bound = min(len(self.kept[row]) + slack, self.cache.capacity)
        lifted = self.cache.lift(row, bound)
        self.cache.layers[0].overwrite(row, mx.array(mx.nan), mx.array(mx.nan))
        self.cache.reserve(ROWS, bound + 1)
        self.cache.insert(row, lifted)

    def swap(self, row: int) -> None:
        """Let a row take the slot of the one before it, which goes."""
        self.cache.move(row, row - 1)
        self.kept[row - 1] = list(self.kept[row])
        self.cache.clear(row)
        self.kept[row] = []


Step = tuple[int, list[int], list[bool], tuple[str, int, int]]
STEPS = st.lists(
    st.integers(1, POSITIONS).flatmap(
        lambda positions: st.tuples(
            st.just(positions),
            st.lists(st.integers(0, positions), min_size=ROWS, max_size=ROWS),
            st.lists(st.sampled_from([False, False, True]), min_size=ROWS, max_size=ROWS),
            st.tuples(st.sampled_from(["", "", "aside", "swap"]), st.integers(1, ROWS - 1), st.integers(0, 2 * RING)),
        )
    ),
    min_size=1,
    max_size=20,
)


@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_every_position_sees_its_window_after_any_acceptance_parking_and_moving(steps: list[Step]) -> None:
    rows = Rows(new_cache())

    for positions, accepted, parked, (move, row, slack) in steps:
        rows.feed(positions, accepted, parked)
        if move == "aside":
            rows.put_aside(row, slack)
        if move == "swap":
            rows.swap(row)

    rows.cache.check()


def test_window_is_seen_over_and_over_however_often_the_ring_is_gone_round() -> None:
    rows = Rows(new_cache())

    for step in range(10 * RING):
        rows.feed(POSITIONS, [step % 5, 4, (step + 3) % 4], [False] * 3)

    assert min(map(len, rows.kept)) > 10 * RING
    assert rows.cache.attention[0].places == RING


@pytest.mark.parametrize("chunks", [(3,), (30,), (7, 1, 9), (1,) * 23, (2, 1, 1, 1, 1, 1, 1, 6, 1, 1)], ids=str)
def test_row_prefilled_in_any_chunks_goes_on_in_the_ring(chunks: tuple[int, ...]) -> None:
    rotating: Any = RotatingKVCache(max_size=WINDOW)  # type: ignore[no-untyped-call]  # mlx-lm carries no types
    fed = 0
    for chunk in chunks:
        rotating.update_and_fetch(*numbered([range(fed, fed + chunk)]))
        fed += chunk
    rows = Rows(new_cache(tokens=40))

    rows.cache.insert(1, [rotating])
    rows.kept[1] = list(range(fed))

    rows._fed = fed
    for _ in range(6):
        rows.feed(3, [1, 2, 3], [False] * 3)


@pytest.mark.parametrize("tokens", [2, RING, RING + 1, 29])
def test_lifted_row_goes_on_in_a_cache_of_mlx(tokens: int) -> None:
    rows = Rows(new_cache())
    for _ in range(tokens):
        rows.feed(POSITIONS, [1, 1, 1], [False] * 3)

    (lifted,) = rows.cache.lift(2, tokens)

    fresh = list(range(900, 903))
    mask = lifted.make_mask(3, window_size=WINDOW)
    keys, _ = lifted.update_and_fetch(*numbered([fresh]))
    numbers = np.array(keys[0, 0, :, 0]).astype(int)
    shown = np.array(mask) if not isinstance(mask, str) else np.tri(3, len(numbers), len(numbers) - 3, dtype=bool)
    for position in range(3):
        wanted = [*rows.kept[2], *fresh[: position + 1]][-WINDOW:]
        assert sorted(numbers[shown[position]].tolist()) == sorted(wanted)


def test_ring_is_kept_bit_by_bit_while_a_row_is_aside() -> None:
    rows = Rows(new_cache())
    for _ in range(9):
        rows.feed(POSITIONS, [2, 3, 2], [False] * 3)
    before = [mx.array(array[1, :, :RING]) for array in rows.cache.arrays]

    rows.put_aside(1, slack=6)

    for array, wanted in zip(rows.cache.arrays, before, strict=True):
        assert (array[1, :, :RING] == wanted).all().item()


def test_insert_leaves_nothing_of_an_earlier_row_behind() -> None:
    cache = new_cache(tokens=40)
    layer = cache.attention[0]
    layer.keys[1] = mx.nan
    layer.values[1] = mx.nan
    rotating: Any = RotatingKVCache(max_size=WINDOW)  # type: ignore[no-untyped-call]  # mlx-lm carries no types
    rotating.update_and_fetch(*numbered([range(3)]))

    cache.insert(1, [rotating])

    assert mx.isfinite(layer.keys[1]).all().item()
    assert (layer.values[1, :, 3:] == 0).all().item()


def test_parked_row_that_is_longer_than_all_that_is_attended_sees_some_key() -> None:
    cache = new_cache(tokens=40)

    cache.begin(mx.array([36, 1, 2], mx.int32), 2, longest=4, parked=mx.array([True, False, False]))

    mask = cache.attention[0].make_mask(2)
    assert mask.shape[-1] == 4
    assert mask.any(axis=-1).all().item()


def test_layer_of_a_window_asked_for_less_shows_less() -> None:
    rows = Rows(new_cache())
    for _ in range(12):
        rows.feed(1, [1, 1, 1], [False] * 3)
    rows.cache.reserve(ROWS, 13)
    rows.cache.begin(mx.full((3,), 12, mx.int32), 1, longest=13)

    mask = rows.cache.attention[0].make_mask(1, window_size=2)

    assert mask.sum(axis=-1).flatten().tolist() == [2, 2, 2]


def test_layer_of_a_window_asked_for_none_shows_its_own() -> None:
    cache = new_cache(tokens=20)
    cache.begin(mx.array([0, 3, 15], mx.int32), 2, longest=17)

    assert cache.attention[0].make_mask(2).sum(axis=-1)[:, 0].tolist() == [[1, 2], [4, 5], [5, 5]]


def test_layer_of_a_window_refuses_a_wider_one() -> None:
    cache = new_cache(tokens=20)
    cache.begin(mx.array([0, 3, 15], mx.int32), 2, longest=17)

    with pytest.raises(EngineError, match="window of 5 tokens was asked for one of 6"):
        cache.attention[0].make_mask(2, window_size=WINDOW + 1)


def test_layer_that_keeps_everything_shows_the_window_it_is_asked_for() -> None:
    cache = new_cache(FULL, tokens=20)
    cache.begin(mx.array([0, 3, 15], mx.int32), 2, longest=17)

    mask = np.array(cache.attention[0].make_mask(2, window_size=4))

    assert [np.flatnonzero(mask[row, 0, 1]).tolist() for row in range(3)] == [[0, 1], [1, 2, 3, 4], [13, 14, 15, 16]]


def test_masks_are_laid_out_anew_for_a_layer_with_other_heads() -> None:
    cache = RaggedCache([SHAPE], query_heads=6, max_positions=2)
    cache.reserve(2, 8)
    cache.begin(mx.array([1, 2], mx.int32), 2, longest=4)
    layer = cache.attention[0]
    mask = layer.make_mask(2)

    wider = layer.for_heads(mask, 8)

    assert layer.for_heads(mask, 6) is mask
    assert mask.shape == (2, 6, 2, 32)
    assert (wider == mx.broadcast_to(mask[:, :1], wider.shape)).all().item()
    assert layer.for_heads(mask, 8) is wider


def test_memory_of_a_windowed_layer_is_its_window_whatever_the_context() -> None:
    cache = RaggedCache([SHAPE, FULL], max_positions=POSITIONS)
    ring = 32  # of 8 tokens, rounded up to a bucket

    cache.reserve(2, 100_000)

    windowed, full = cache.attention
    assert windowed.nbytes == 2 * SHAPE.token_bytes * (ring + POSITIONS)
    assert full.nbytes == 2 * SHAPE.token_bytes * (cache.capacity + POSITIONS)
    assert cache.nbytes == 2 * cache.row_bytes(100_000)


def test_short_rows_are_not_laid_out_for_the_whole_window() -> None:
    cache = RaggedCache([SHAPE._replace(window=4096)], max_positions=POSITIONS)

    cache.reserve(2, 100)

    assert cache.attention[0].places == cache.capacity == 256
    assert cache.nbytes == 2 * cache.row_bytes(100)


def test_growing_moves_no_token_of_a_ring() -> None:
    rows = Rows(new_cache())
    for _ in range(3):
        rows.feed(POSITIONS, [3, 4, 2], [False] * 3)

    rows.cache.reserve(7, 500)

    rows.cache.begin(mx.array([len(row) for row in rows.kept], mx.int32), 1, longest=13)
    layer = rows.cache.attention[0]
    mask = layer.make_mask(1)
    keys, values = layer.update_and_fetch(*numbered([[777]] * 3))
    for row, kept in enumerate(rows.kept):
        assert seen_by(keys, values, mask, row, 0) == [*kept, 777][-WINDOW:]


def test_copy_of_a_rotating_cache_stays_as_it_is_while_the_other_is_written() -> None:
    source: Any = RotatingKVCache(max_size=WINDOW)  # type: ignore[no-untyped-call]  # mlx-lm carries no types
    source.update_and_fetch(*numbered([range(9)]))
    source.update_and_fetch(*numbered([[9]]))
    target: Any = RotatingKVCache(max_size=WINDOW)  # type: ignore[no-untyped-call]  # mlx-lm carries no types

    copy_rotating(source, target)
    source.update_and_fetch(*numbered([[100]]))
    target.update_and_fetch(*numbered([[200]]))

    held = [np.array(in_order(cache)[0][0, 0, :, 0]).astype(int).tolist() for cache in (source, target)]
    assert held == [[6, 7, 8, 9, 100], [6, 7, 8, 9, 200]]
    assert source.offset == target.offset == 11
