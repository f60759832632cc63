"""Attention layers that see a sliding window and keep no more of a row than that: a ring of places for each slot.

Position p lies in place p modulo the ring, so a short row is laid out as in any other layer. The ring is longer than
the window by what one forward writes: a rejected draft, which is overwritten once the row's offset is lowered, has then
taken no place that is still in sight. Owns the ring, and the way into it and out of it for mlx-lm's rotating caches,
in which single rows are prefilled.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from mtplx_core.caches.ragged_layer import BatchCaches, LayerShape, RaggedLayer
from mtplx_core.errors import EngineError


class WindowedLayer(RaggedLayer):
    """A `RaggedLayer` with at most `ring` places.

    Args:
        batch: the caches of all layers.
        shape: with a window.
        ring: at least the window and all positions of a forward but one.
    """

    def __init__(self, batch: BatchCaches, shape: LayerShape, *, ring: int) -> None:
        super().__init__(batch, shape)
        assert shape.window is not None
        assert ring >= shape.window + batch.sink - 1
        self.window = shape.window
        self._ring = ring

    def places_for(self, capacity: int) -> int:
        """Return the tokens a slot keeps; the ring is grown into, and once it is reached a position keeps its place."""
        return min(capacity, self._ring)

    def make_mask(self, positions: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Return the mask of the window asked for, or else of the layer's own.

        Raises:
            EngineError: a wider one, of which keys are gone.
        """
        if window_size is not None and window_size > self.window:
            raise EngineError(f"a layer that keeps a window of {self.window} tokens was asked for one of {window_size}")
        return self._batch.forward.mask(self.places, window_size or self.window)

    def insert(self, slot: int, filled: Any) -> None:
        keys, values = in_order(filled)
        self.keys = self._laid_into(self.keys, slot, keys, end=filled.offset)
        self.values = self._laid_into(self.values, slot, values, end=filled.offset)

    def lift(self, slot: int, tokens: int) -> Any:
        """Return a copy of a slot as of its first `tokens` tokens, in a rotating cache.

        All of the ring is copied. So `tokens` may be a bound, and put back the ring is what it was.
        """
        lifted: Any = RotatingKVCache(max_size=self.window)  # type: ignore[no-untyped-call]  # mlx-lm carries no types
        if tokens:
            kept, start = min(tokens, self._ring), tokens % self._ring if tokens > self._ring else 0
            arrays = (_turned(array[slot : slot + 1, :, :kept], start) for array in self.arrays)
            lifted.state = (*arrays, tokens, lifted.keep, lifted.max_size, kept)
        return lifted

    def _laid_into(self, buffer: mx.array, slot: int, tokens: mx.array, *, end: int) -> mx.array:
        """Lay out what a row has, (1, heads, tokens, size), the last of which is at position `end` - 1."""
        tokens = tokens[:, :, -self._ring :]
        count = tokens.shape[2]
        start = (end - count) % self._ring
        first = min(count, self._ring - start)
        buffer[slot : slot + 1] = 0
        buffer[slot : slot + 1, :, start : start + first] = tokens[:, :, :first]
        if first < count:
            buffer[slot : slot + 1, :, : count - first] = tokens[:, :, first:]
        return buffer


def in_order(cache: Any) -> tuple[mx.array, mx.array]:
    """Return the keys and values in one of mlx-lm's rotating caches, oldest first, up to the newest."""
    keys, values, offset, _, _, written = cache.state
    if written < min(offset, keys.shape[2]):
        return _turned(keys, written), _turned(values, written)
    return keys[:, :, :written], values[:, :, :written]


def copy_rotating(source: Any, target: Any) -> None:
    """Fill a fresh rotating cache like another one; both can be written to afterwards."""
    if source.empty():
        return
    # Rotating caches write in place, so arrays must not be shared.
    arrays = [mx.contiguous(array[:, :, -source.max_size :]) for array in in_order(source)]
    target.state = (*arrays, source.offset, source.keep, source.max_size, arrays[0].shape[2])


def _turned(ring: mx.array, start: int) -> mx.array:
    """A copy of a ring that begins with place `start`."""
    return mx.concatenate([ring[:, :, start:], ring[:, :, :start]], axis=2) if start else mx.contiguous(ring)
