"""Key-value caches for rows of different lengths, behind mlx-lm's cache interface; recurrent layers ride along.

Each row writes at its own offset and sees what lies before it, or a window of that; lowering an offset is all it takes
to reject positions, which are then overwritten. Rows that are parked write into a sink behind all other places. The
bound on what may be written is kept on the host, so no device value is ever read back. It owns no policy: who sits in
which slot and how long rows may become is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from mtplx_core.caches.forward import Forward
from mtplx_core.caches.ragged_layer import LayerShape, RaggedLayer
from mtplx_core.caches.recurrent import RecurrentLayer, RecurrentShape, recurrent_shape, slot_of
from mtplx_core.caches.windowed import WindowedLayer

GROWTH_TOKENS = 256

Layer = RaggedLayer | RecurrentLayer


class RaggedCache:
    """The caches of all layers: slots that rows take and leave, and the forward being built.

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
        self.slots = 0
        self.capacity = 0
        self.sink = max_positions
        self.forward = Forward(mx.zeros((0,), mx.int32), 0, longest=0, bucket=0)
        self._query_heads = query_heads
        self._bucket = bucket
        self._growth = growth
        self.layers: list[Layer] = [self._new_layer(shape) for shape in shapes]

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
        return self.forward.rows

    def row_bytes(self, tokens: int) -> int:
        """Memory of one slot that holds `tokens`."""
        return sum(layer.bytes_for(self.capacity_for(tokens)) for layer in self.layers)

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
                layer.grow(slots, capacity)
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
        """Set what the next forward over the first `offset.size` slots writes and sees.

        Args:
            offset: tokens each row has, (rows,) int32.
            positions: positions the forward feeds.
            longest: a host-side bound on `offset` plus `positions` over the rows not parked.
            parked: rows whose positions go to the sink, (rows,) bool.
            lengths: the same bound by row, where it is known; parked rows may have any.

        Raises:
            ValueError: the bound is beyond the capacity; nothing on the device would check it.
        """
        if longest > self.capacity or positions > self.sink or offset.size > self.slots:
            raise ValueError(f"{offset.size} rows of up to {longest} tokens do not fit {self.slots} x {self.capacity}")
        self.forward = Forward(
            offset,
            positions,
            longest=longest,
            bucket=self.attended_for(longest),
            parked=parked,
            lengths=lengths,
            query_heads=self._query_heads,
        )

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
                if array.shape[2] not in (0, layer.places + self.sink):
                    raise AssertionError(f"{array.shape} is not {self.slots} x {layer.places} + {self.sink}")

    def _new_layer(self, shape: LayerShape | RecurrentShape) -> Layer:
        if isinstance(shape, RecurrentShape):
            return RecurrentLayer(self, shape)
        if shape.window is None:
            return RaggedLayer(self, shape)
        # One place more for each position of a forward but the first keeps rejected ones out of the window.
        needed = shape.window + self.sink - 1
        return WindowedLayer(self, shape, ring=-(-needed // self._bucket) * self._bucket)


def plain_caches(count: int) -> list[KVCache]:
    """mlx-lm's caches for one row that is not in the batch."""
    return [KVCache() for _ in range(count)]  # type: ignore[no-untyped-call]  # mlx-lm carries no types


def layer_shapes(probe: Sequence[Any]) -> list[LayerShape | RecurrentShape]:
    """The shapes behind a probe: caches that went through one forward, evaluated or not."""
    return [recurrent_shape(cache) if isinstance(cache, ArraysCache) else _layer_shape(cache) for cache in probe]


def cache_arrays(caches: Sequence[Any]) -> list[mx.array]:
    """What mlx-lm's caches of one row hold."""
    held = [cache.cache if isinstance(cache, ArraysCache) else (cache.keys, cache.values) for cache in caches]
    return [array for arrays in held for array in arrays if array is not None]


def _layer_shape(cache: Any) -> LayerShape:
    window = cache.max_size if isinstance(cache, RotatingKVCache) else None
    return LayerShape(cache.keys.shape[1], cache.keys.shape[3], cache.values.shape[3], cache.keys.dtype, window)
