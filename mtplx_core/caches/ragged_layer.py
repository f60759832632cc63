"""Keys and values of one attention layer by slot, behind the verbs of mlx-lm's caches.

Every row writes at its own offset. Owns the arrays; where positions go and which keys they see is worked out for the
whole forward elsewhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mtplx_core.caches.forward import Forward, RowSpan, View


class LayerShape(NamedTuple):
    """What one layer keeps per token; key and value heads may differ in size."""

    heads: int
    key_size: int
    value_size: int
    dtype: mx.Dtype
    window: int | None = None
    """Positions that a position sees, its own included; None: all before it."""

    @property
    def token_bytes(self) -> int:
        return self.heads * (self.key_size + self.value_size) * self.dtype.size


class BatchCaches(Protocol):
    """The caches of all layers, as far as one layer must know them."""

    forward: Forward
    """The forward being built."""
    capacity: int
    """Tokens a slot is laid out for."""
    sink: int
    """Places behind the others, for the positions of parked rows."""


class RaggedLayer:
    """One layer's keys and values, (slots, heads, places + sink, size), with mlx-lm's cache verbs."""

    def __init__(self, batch: BatchCaches, shape: LayerShape) -> None:
        self._batch = batch
        self.shape = shape
        self.keys = mx.zeros((0, shape.heads, 0, shape.key_size), shape.dtype)
        self.values = mx.zeros((0, shape.heads, 0, shape.value_size), shape.dtype)

    @property
    def offset(self) -> mx.array:
        return self._batch.forward.offset

    @property
    def arrays(self) -> list[mx.array]:
        return [self.keys, self.values]

    @property
    def nbytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes)

    @property
    def places(self) -> int:
        """Tokens a slot keeps."""
        return self.places_for(self._batch.capacity)

    @property
    def view(self) -> View:
        """The places that the forward being built writes and reads."""
        return self._batch.forward.view(self.places)

    @property
    def runs(self) -> tuple[RowSpan, ...]:
        return self.view.runs

    def places_for(self, capacity: int) -> int:
        """Return the tokens a slot keeps of a row of `capacity` tokens."""
        return capacity

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = self._write(self.keys, keys)
        self.values = self._write(self.values, values)
        rows, attended = keys.shape[0], self.view.attended
        return self.keys[:rows, :, :attended], self.values[:rows, :, :attended]

    def make_mask(self, positions: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return self._batch.forward.mask(self.places, window_size)

    def by_run(self, mask: mx.array) -> list[tuple[RowSpan, mx.array]]:
        """Return the runs behind a mask over all rows, each with what its rows see."""
        return self._batch.forward.by_run(mask, self.view)

    def for_heads(self, mask: mx.array, heads: int) -> mx.array:
        """Return a mask laid out for so many query heads."""
        return self._batch.forward.for_heads(mask, heads)

    def is_trimmable(self) -> bool:
        return False

    def bytes_for(self, capacity: int) -> int:
        """Return the memory of one slot for rows of `capacity` tokens, sink included."""
        return self.shape.token_bytes * (self.places_for(capacity) + self._batch.sink)

    def grow(self, slots: int, capacity: int) -> None:
        """Make room for `slots` rows of `capacity` tokens; what is there stays."""
        kept, length = self.places, self.places_for(capacity) + self._batch.sink
        if self.keys.shape[0] != slots or self.keys.shape[2] != length:
            self.keys, self.values = (_grown(array, slots, length, kept) for array in self.arrays)

    def insert(self, slot: int, filled: Any) -> None:
        self.keys = _replaced(self.keys, slot, filled.keys, filled.offset)
        self.values = _replaced(self.values, slot, filled.values, filled.offset)

    def lift(self, slot: int, tokens: int) -> Any:
        """Return copies of a slot's first `tokens` keys and values, in a cache of mlx-lm's."""
        lifted: Any = KVCache()  # type: ignore[no-untyped-call]  # mlx-lm carries no types
        if tokens:
            lifted.state = (*(mx.contiguous(array[slot : slot + 1, :, :tokens]) for array in self.arrays), tokens)
        return lifted

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
            return mx.put_along_axis(buffer, self._batch.forward.written(self.places, fresh.shape), fresh, axis=2)
        row = mx.arange(rows, dtype=mx.int32)[:, None, None]
        buffer[row, mx.arange(heads, dtype=mx.int32)[:, None], self.view.write[..., 0]] = fresh
        return buffer


def _grown(buffer: mx.array, slots: int, length: int, kept: int) -> mx.array:
    grown = mx.zeros((slots, buffer.shape[1], length, buffer.shape[3]), buffer.dtype)
    if buffer.size:
        grown[: buffer.shape[0], :, :kept] = buffer[:, :, :kept]
    return grown


def _replaced(buffer: mx.array, slot: int, filled: mx.array, tokens: int) -> mx.array:
    buffer[slot : slot + 1, :, :tokens] = filled[:, :, :tokens]
    buffer[slot : slot + 1, :, tokens:] = 0
    return buffer
