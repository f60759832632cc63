"""Key-value caches for rows of different lengths, behind mlx-lm's cache interface; recurrent layers ride along.

Each row writes at its own offset and sees what lies before it; lowering an offset is all it takes to reject
positions, which are then overwritten. Rows that are parked write into a sink behind the capacity. The bound on what
may be written is kept on the host, so no device value is ever read back. It owns no policy: who sits in which slot
and how long rows may become is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache

from mtplx_core.recurrent import RecurrentLayer, RecurrentShape, recurrent_shape, slot_of

GROWTH_TOKENS = 256
RUN_TOKENS = 256
"""Neighbouring rows whose lengths round up to the same multiple attend together; each run has a price of its own."""


class LayerShape(NamedTuple):
    """What one layer keeps per token; key and value heads may differ in size."""

    heads: int
    key_size: int
    value_size: int
    dtype: mx.Dtype

    @property
    def token_bytes(self) -> int:
        return self.heads * (self.key_size + self.value_size) * self.dtype.size


class Run(NamedTuple):
    """Neighbouring rows that attend to equally many keys."""

    start: int
    stop: int
    attended: int


class Window(NamedTuple):
    """What one forward writes and sees, the same for all layers."""

    offset: mx.array
    """First position of each row, (rows,) int32."""
    write: mx.array
    """Where each position goes, (rows, 1, positions, 1) int32."""
    attended: int
    """Keys that take part: a bucket at least as long as the longest row."""
    mask: mx.array
    """(rows, 1 or query heads, positions, attended) bool"""
    runs: tuple[Run, ...] = ()
    """All rows, for attention that can leave out what lies behind the rows' ends."""


class RaggedLayer:
    """One layer's keys and values, (slots, heads, capacity + sink, size), with mlx-lm's cache verbs."""

    def __init__(self, cache: RaggedCache, shape: LayerShape) -> None:
        self._cache = cache
        self.shape = shape
        self.keys = mx.zeros((0, shape.heads, 0, shape.key_size), shape.dtype)
        self.values = mx.zeros((0, shape.heads, 0, shape.value_size), shape.dtype)

    @property
    def offset(self) -> mx.array:
        return self._cache.window.offset

    @property
    def arrays(self) -> list[mx.array]:
        return [self.keys, self.values]

    @property
    def nbytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = self._write(self.keys, keys)
        self.values = self._write(self.values, values)
        rows, attended = keys.shape[0], self._cache.window.attended
        return self.keys[:rows, :, :attended], self.values[:rows, :, :attended]

    def make_mask(self, positions: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return self._cache.window.mask

    @property
    def runs(self) -> tuple[Run, ...]:
        return self._cache.window.runs

    def by_run(self, mask: mx.array) -> list[mx.array]:
        """A mask over all rows, cut to what the rows of each run see."""
        return self._cache.by_run(mask)

    def is_trimmable(self) -> bool:
        return False

    def bytes_for(self, positions: int) -> int:
        """Memory of one slot of so many positions, sink included."""
        return self.shape.token_bytes * positions

    def grow(self, slots: int, length: int, *, keep: int) -> None:
        """Make room for `slots` rows of `length` positions, the first `keep` of which stay."""
        self.keys, self.values = (_grown(array, slots, length, keep) for array in self.arrays)

    def insert(self, slot: int, filled: Any) -> None:
        self.keys = _replaced(self.keys, slot, filled.keys, filled.offset)
        self.values = _replaced(self.values, slot, filled.values, filled.offset)

    def lift(self, slot: int, tokens: int) -> KVCache:
        """Copies of a slot's first `tokens` keys and values."""
        lifted: Any = plain_caches(1)[0]
        if tokens:
            lifted.state = (*(mx.contiguous(array[slot : slot + 1, :, :tokens]) for array in self.arrays), tokens)
        return cast(KVCache, lifted)

    def clear(self, slot: int) -> None:
        """A masked key still takes part as 0 times its value, so a NaN in it would spread."""
        self.keys[slot : slot + 1] = 0
        self.values[slot : slot + 1] = 0

    def overwrite(self, slot: int, keys: mx.array, values: mx.array) -> None:
        self.keys[slot : slot + 1], self.values[slot : slot + 1] = keys, values

    def release(self) -> None:
        self.keys, self.values = self.keys[:0, :, :0], self.values[:0, :, :0]

    def _write(self, buffer: mx.array, fresh: mx.array) -> mx.array:
        rows, heads = fresh.shape[:2]
        if rows == buffer.shape[0]:
            return mx.put_along_axis(buffer, self._cache.places(fresh.shape), fresh, axis=2)
        row = mx.arange(rows, dtype=mx.int32)[:, None, None]
        buffer[row, mx.arange(heads, dtype=mx.int32)[:, None], self._cache.window.write[..., 0]] = fresh
        return buffer


Layer = RaggedLayer | RecurrentLayer


class RaggedCache:
    """The caches of all layers: slots that rows take and leave, and the window of the forward being built.

    Args:
        shapes: one per layer.
        query_heads: to lay the mask out for the fused attention kernel; 1 keeps it shared between heads, which is
            what the unfused CPU path wants.
        max_positions: most positions one forward writes; the size of the sink.
        bucket: attended lengths are rounded up to a multiple of this, doubled with the length.
        growth: slots are laid out in multiples of so many tokens.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape | RecurrentShape],
        *,
        query_heads: int = 1,
        max_positions: int = 1,
        bucket: int = 32,
        growth: int = GROWTH_TOKENS,
    ) -> None:
        self.layers: list[Layer] = [
            RaggedLayer(self, shape) if isinstance(shape, LayerShape) else RecurrentLayer(self, shape)
            for shape in shapes
        ]
        self.slots = 0
        self.capacity = 0
        self.window = Window(mx.zeros((0,), mx.int32), mx.zeros((0, 1, 0, 1), mx.int32), 0, mx.zeros((0,)))
        self._query_heads = query_heads
        self._sink = max_positions
        self._bucket = bucket
        self._growth = growth
        self._cut: tuple[mx.array, list[mx.array]] | None = None
        self._places: dict[tuple[int, ...], mx.array] = {}

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def arrays(self) -> list[mx.array]:
        return [array for layer in self.layers for array in layer.arrays]

    @property
    def attention(self) -> list[RaggedLayer]:
        """The layers that keep keys and values."""
        return [layer for layer in self.layers if isinstance(layer, RaggedLayer)]

    @property
    def recurrent(self) -> list[RecurrentLayer]:
        """The layers that keep a state instead."""
        return [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]

    @property
    def rows(self) -> int:
        """Rows of the forward being built."""
        return int(self.window.offset.size)

    def row_bytes(self, tokens: int) -> int:
        """Memory of one slot that holds `tokens`."""
        return sum(layer.bytes_for(self.capacity_for(tokens) + self._sink) for layer in self.layers)

    def attended_for(self, tokens: int) -> int:
        """The bucket that holds `tokens` keys."""
        step = self._bucket
        while step * 8 < tokens:
            step *= 2
        return -(-tokens // step) * step

    def capacity_for(self, tokens: int) -> int:
        """Tokens a slot is laid out for when it must hold `tokens`."""
        return -(-self.attended_for(tokens) // self._growth) * self._growth

    def reserve(self, slots: int, tokens: int) -> None:
        """Make room for `slots` rows of `tokens` tokens each; what is there stays."""
        capacity = max(self.capacity, self.capacity_for(tokens))
        slots = max(slots, self.slots)
        if slots == self.slots and capacity == self.capacity:
            return
        for layer in self.layers:
            if isinstance(layer, RaggedLayer):
                layer.grow(slots, capacity + self._sink, keep=self.capacity)
            else:
                layer.grow(slots)
            mx.eval(layer.arrays)  # layer by layer, so that only one is held twice
        self.slots, self.capacity = slots, capacity

    def release(self) -> None:
        """Free all slots and their memory."""
        for layer in self.layers:
            layer.release()
        self.slots = self.capacity = 0
        mx.eval(self.arrays)

    def begin(
        self,
        offset: mx.array,
        positions: int,
        *,
        longest: int,
        parked: mx.array | None = None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        """Set the window of the next forward over the first `offset.size` slots.

        Args:
            offset: tokens each row has, (rows,) int32.
            positions: positions the forward feeds.
            longest: a host-side bound on `offset` plus `positions` over the rows not parked.
            parked: rows whose positions go to the sink, (rows,) bool.
            lengths: the same bound by row, where it is known; parked rows may have any.

        Raises:
            ValueError: the bound is beyond the capacity; nothing on the device would check it.
        """
        if longest > self.capacity or positions > self._sink or offset.size > self.slots:
            raise ValueError(f"{offset.size} rows of up to {longest} tokens do not fit {self.slots} x {self.capacity}")
        steps = mx.arange(positions, dtype=mx.int32)
        at = offset[:, None] + steps  # (rows, positions)
        attended = self.attended_for(longest)
        seen = mx.arange(attended, dtype=mx.int32) <= at[:, :, None]  # (rows, positions, attended)
        if parked is not None:
            at = mx.where(parked[:, None], self.capacity + steps, at)
        mask = seen[:, None]
        if self._query_heads > 1:
            mask = mx.contiguous(mx.broadcast_to(mask, (mask.shape[0], self._query_heads, *mask.shape[2:])))
        runs = _runs(lengths or [longest] * int(offset.size), attended)
        self.window = Window(offset, at[:, None, :, None], attended, mask, runs)
        self._cut, self._places = None, {}

    def by_run(self, mask: mx.array) -> list[mx.array]:
        """A mask cut into runs, once for all layers that bring the same one."""
        if self._cut is None or self._cut[0] is not mask:
            self._cut = mask, [mask[run.start : run.stop, :, :, : run.attended] for run in self.window.runs]
        return self._cut[1]

    def places(self, shape: tuple[int, ...]) -> mx.array:
        """Where keys or values of a shape, (rows, heads, positions, size), are written; made once for all layers."""
        if shape not in self._places:
            self._places[shape] = mx.broadcast_to(self.window.write, shape)
        return self._places[shape]

    def commit(self, taken: mx.array, *, known: Sequence[int] | None = None) -> None:
        """Advance the recurrent layers by what each row takes of the last forward; keys and values need no such step.

        Args:
            taken: positions, (rows,) int32; 0 for parked rows.
            known: the same where the host knows it, which may save work.
        """
        for layer in self.recurrent:
            layer.commit(taken, known=known)

    def insert(self, slot: int, layers: Sequence[Any]) -> None:
        """Copy a prefilled row in; behind it the slot is zero, so nothing of an earlier row can be met."""
        for layer, filled in zip(self.layers, layers, strict=True):
            if filled.empty():
                layer.clear(slot)
            else:
                layer.insert(slot, filled)

    def lift(self, slot: int, tokens: int) -> list[Any]:
        """Copies of a slot that holds up to `tokens` tokens, in caches that `insert` takes."""
        return [layer.lift(slot, tokens) for layer in self.layers]

    def clear(self, slot: int) -> None:
        """Zero a slot."""
        for layer in self.layers:
            layer.clear(slot)

    def move(self, source: int, target: int) -> None:
        """Copy one slot over another."""
        copies = [[slot_of(array, source) for array in layer.arrays] for layer in self.layers]
        # As long as an array waits to be read it is not written in place but copied whole.
        mx.async_eval(copies)  # type: ignore[no-untyped-call]  # mlx annotates only in part
        for layer, arrays in zip(self.layers, copies, strict=True):
            layer.overwrite(target, *arrays)

    def check(self) -> None:
        """Raise if the layers disagree with the bookkeeping; for tests."""
        for array in self.arrays:
            if array.shape[0] != self.slots:
                raise AssertionError(f"{array.shape} is not of {self.slots} slots")
        for layer in self.attention:
            for array in layer.arrays:
                if array.shape[2] not in (0, self.capacity + self._sink):
                    raise AssertionError(f"{array.shape} is not {self.slots} x {self.capacity} + {self._sink}")


def plain_caches(count: int) -> list[KVCache]:
    """mlx-lm's caches for one row that is not in the batch."""
    return [KVCache() for _ in range(count)]  # type: ignore[no-untyped-call]  # mlx-lm carries no types


def layer_shapes(probe: Sequence[Any]) -> list[LayerShape | RecurrentShape]:
    """The shapes behind a probe: caches that went through one forward, evaluated or not."""
    return [
        recurrent_shape(cache)
        if isinstance(cache, ArraysCache)
        else LayerShape(cache.keys.shape[1], cache.keys.shape[3], cache.values.shape[3], cache.keys.dtype)
        for cache in probe
    ]


def cache_arrays(caches: Sequence[Any]) -> list[mx.array]:
    """What mlx-lm's caches of one row hold."""
    held = [cache.cache if isinstance(cache, ArraysCache) else (cache.keys, cache.values) for cache in caches]
    return [array for arrays in held for array in arrays if array is not None]


def _runs(lengths: Sequence[int], attended: int) -> tuple[Run, ...]:
    """Every row gets a bucket by its own length alone, so that no neighbour's length changes its sums."""
    runs: list[Run] = []
    for row, length in enumerate(lengths):
        own = min(-(-max(length, 1) // RUN_TOKENS) * RUN_TOKENS, attended)
        if runs and runs[-1].attended == own:
            runs[-1] = runs[-1]._replace(stop=row + 1)
        else:
            runs.append(Run(row, row + 1, own))
    return tuple(runs)


def _grown(buffer: mx.array, slots: int, length: int, keep: int) -> mx.array:
    grown = mx.zeros((slots, buffer.shape[1], length, buffer.shape[3]), buffer.dtype)
    if buffer.size:
        grown[: buffer.shape[0], :, :keep] = buffer[:, :, :keep]
    return grown


def _replaced(buffer: mx.array, slot: int, filled: mx.array, tokens: int) -> mx.array:
    buffer[slot : slot + 1, :, :tokens] = filled[:, :, :tokens]
    buffer[slot : slot + 1, :, tokens:] = 0
    return buffer
