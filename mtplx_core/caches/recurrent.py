"""Recurrent layers (gated delta nets) whose rows take different numbers of the tokens they were fed.

A recurrent state cannot be rewound. So a forward leaves a slot's convolution window and state as they were and keeps
what it fed to the update; once it is known how many tokens a row takes, that many are applied, by mlx-lm's own masked
update. Where mlx-lm has no kernel and would go position by position, the same rule is computed as products of matrices,
and what every position wrote is kept instead. Owns listening to mlx-lm's layers and the state by slot; how many are
taken is decided elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple, Protocol, cast

import mlx.core as mx
from mlx_lm.models import qwen3_5, qwen3_next
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.gated_delta import gated_delta_update

from mtplx_core.caches.delta_rule import Written, delta_rule
from mtplx_core.caches.rebinding import rebound

LAYER_KINDS = (qwen3_5.GatedDeltaNet, qwen3_next.Qwen3NextGatedDeltaNet)
"""The layers whose insides are known here: one convolution, one call of `gated_delta_update`, a cache of two arrays."""
_ARGUMENTS = tuple(signature(gated_delta_update).parameters)
_OF_THE_RULE = frozenset(signature(delta_rule).parameters) - {"state"}
"""Those that `delta_rule` knows; mlx-lm's kernel switch is beside them."""


class RecurrentShape(NamedTuple):
    """What one recurrent layer keeps per row."""

    window: tuple[int, int]
    """Inputs the convolution looks back on, channels."""
    window_dtype: mx.Dtype
    state: tuple[int, ...]
    """Value heads, value size, key size."""
    state_dtype: mx.Dtype

    @property
    def row_bytes(self) -> int:
        return math.prod(self.window) * self.window_dtype.size + math.prod(self.state) * self.state_dtype.size


class RecurrentForward(Protocol):
    """The forward being built, as far as a recurrent layer must know it."""

    @property
    def rows(self) -> int:
        """It runs over the first so many slots."""


class Update(NamedTuple):
    """One call of mlx-lm's update: all it was given but state and mask."""

    arguments: Mapping[str, Any]

    @property
    def positions(self) -> int:
        return int(self.arguments["q"].shape[1])

    def __call__(self, state: mx.array | None, mask: mx.array | None) -> tuple[mx.array, mx.array]:
        """Outputs at all positions, and the state behind the last one the mask lets through."""
        outputs: tuple[mx.array, mx.array] = gated_delta_update(**self.arguments, state=state, mask=mask)
        return outputs

    def by_products(self, state: mx.array) -> tuple[mx.array, Written]:
        """Outputs at all positions, and what the positions wrote.

        Raises:
            TypeError: the update was given something that changes the rule.
        """
        given = {name: value for name, value in self.arguments.items() if name != "use_kernel"}
        if given.keys() != _OF_THE_RULE:
            raise TypeError(f"mlx-lm's layer gives its update {sorted(given.keys() ^ _OF_THE_RULE)} otherwise")
        outputs, written = delta_rule(**given, state=state)
        return outputs.astype(given["q"].dtype), written

    def behind(self, state: mx.array, taken: mx.array) -> mx.array:
        """The state behind the first `taken` (rows,) positions."""
        _, after = self(state, mx.arange(self.positions, dtype=taken.dtype) < taken[:, None])
        return after


class RecurrentLayer:
    """One layer's windows and states by slot, with the verbs of mlx-lm's `ArraysCache`.

    Reading gives what was there before the forward; what the forward writes stays aside until `commit`.
    """

    lengths: mx.array | None = None
    left_padding: mx.array | None = None
    """Both None: no row is ever padded, and without a mask the faster kernels are taken."""

    def __init__(self, forward: RecurrentForward, shape: RecurrentShape, *, has_kernel: bool | None = None) -> None:
        self.shape = shape
        self._forward = forward
        self.window = mx.zeros((0, *shape.window), shape.window_dtype)
        self.state = mx.zeros((0, *shape.state), shape.state_dtype)
        self._after: list[mx.array] = [self.window, self.state]
        self._conv_input: mx.array | None = None
        self._fed: Update | Written | None = None
        self._has_kernel = mx.default_device() == mx.Device(mx.gpu) if has_kernel is None else has_kernel
        """Whether mlx-lm's update does all positions in one go."""

    @property
    def arrays(self) -> list[mx.array]:
        return [self.window, self.state]

    @property
    def nbytes(self) -> int:
        return int(self.window.nbytes + self.state.nbytes)

    def bytes_for(self, capacity: int) -> int:
        """Memory of one slot, whatever its length: what was before a cycle and what is after live side by side."""
        return 2 * self.shape.row_bytes

    def __getitem__(self, index: int) -> mx.array:
        rows, array = self._forward.rows, self.arrays[index]
        return array if rows == array.shape[0] else array[:rows]

    def __setitem__(self, index: int, value: mx.array) -> None:
        self._after[index] = value

    def advance(self, positions: int) -> None:
        """mlx-lm counts down lengths and padding here; there are none."""

    def make_mask(self, positions: int) -> None:
        """Every position is fed; which of them count is known only afterwards."""

    def hear_input(self, conv_input: mx.array) -> None:
        """Take in the window followed by the forward's inputs, (rows, window + positions, channels)."""
        self._conv_input = conv_input

    def hear_update(self, update: Update, state: mx.array | None, mask: mx.array | None) -> tuple[mx.array, mx.array]:
        """Take in what is fed to the update, and do it."""
        if self._has_kernel or state is None or mask is not None:
            self._fed = update
            return update(state, mask)
        outputs, self._fed = update.by_products(state)
        return outputs, self._fed.behind(state)

    def commit(self, taken: mx.array, *, known: Sequence[int] | None = None) -> None:
        """Apply the first `taken` (rows,) positions of the last forward.

        Args:
            taken: 0 leaves a row as it was.
            known: the same where the host knows it. Where all rows take all positions, what the forward itself ended
                in is right.
        """
        if self._fed is None or self._conv_input is None:
            raise ValueError("nothing was heard of the last forward")
        positions = self._fed.positions
        if known is not None and min(known) == positions:
            window, state = self._after
        elif positions == 1:
            window, state = (
                mx.where(_like(taken > 0, after), after, self[index]) for index, after in enumerate(self._after)
            )
        else:
            window = _window(self._conv_input, taken, self.shape.window[0])
            state = self._fed.behind(self[1], taken)
        self.window, self.state = _with_first(self.window, window), _with_first(self.state, state)
        self._forget()

    def grow(self, slots: int) -> None:
        self.window, self.state = (_grown(array, slots) for array in self.arrays)
        self._forget()

    def insert(self, slot: int, filled: Any) -> None:
        """Take over an `ArraysCache` of one row."""
        self.window = _replaced(self.window, slot, filled[0])
        self.state = _replaced(self.state, slot, filled[1])

    def lift(self, slot: int, tokens: int) -> ArraysCache:
        """A copy of a slot that was fed up to `tokens` tokens."""
        lifted: Any = ArraysCache(size=2)
        if tokens:
            lifted.cache = [slot_of(array, slot) for array in self.arrays]
        return cast(ArraysCache, lifted)

    def clear(self, slot: int) -> None:
        """The state of a row that was fed nothing."""
        self.window[slot : slot + 1] = 0
        self.state[slot : slot + 1] = 0

    def overwrite(self, slot: int, window: mx.array, state: mx.array) -> None:
        self.window[slot : slot + 1], self.state[slot : slot + 1] = window, state

    def release(self) -> None:
        self.window, self.state = self.window[:0], self.state[:0]
        self._forget()

    def _forget(self) -> None:
        """What was heard holds the arrays of a whole forward."""
        self._after = self.arrays
        self._conv_input = self._fed = None


def recurrent_shape(filled: Any) -> RecurrentShape:
    """The shape behind an `ArraysCache` that went through one forward, evaluated or not."""
    window, state = filled[0], filled[1]
    return RecurrentShape(window.shape[1:], window.dtype, state.shape[1:], state.dtype)


def listen_to(layers: Sequence[Any]) -> None:
    """Let the gated delta layers among a model's layers tell a `RecurrentLayer` what they feed their update.

    Nothing changes in what they compute, whatever cache they are given; listening twice is listening once.

    Raises:
        TypeError: mlx-lm's layer no longer works the way this relies on.
    """
    for layer in layers:
        recurrent = getattr(layer, "linear_attn", None)
        if isinstance(recurrent, LAYER_KINDS) and not isinstance(recurrent, _Listened):
            _listen(recurrent)


class _Listened:
    """Marks a layer that is listened to."""


class _Tap:
    """Stands between one layer and what it calls, and passes on what it hears to the cache of that call."""

    def __init__(self) -> None:
        self.cache: RecurrentLayer | None = None

    def update(self, *given: Any, **named: Any) -> tuple[mx.array, mx.array]:
        """mlx-lm's `gated_delta_update`."""
        arguments = {**dict(zip(_ARGUMENTS, given, strict=False)), **named}
        state, mask = arguments.pop("state", None), arguments.pop("mask", None)
        update = Update(arguments)
        return update(state, mask) if self.cache is None else self.cache.hear_update(update, state, mask)


def _listen(recurrent: Any) -> None:
    """Give the layer and its convolution classes of their own, whose calls pass the tap."""
    kind, conv_kind, tap = type(recurrent), type(recurrent.conv1d), _Tap()
    computed = rebound(kind.__call__, {"gated_delta_update": tap.update})

    def call(self: Any, inputs: mx.array, mask: mx.array | None = None, cache: Any = None) -> Any:
        tap.cache = cache if isinstance(cache, RecurrentLayer) else None
        try:
            return computed(self, inputs, mask, cache)
        finally:
            tap.cache = None

    def convolve(self: Any, inputs: mx.array) -> Any:
        if tap.cache is not None:
            tap.cache.hear_input(inputs)
        return conv_kind.__call__(self, inputs)

    recurrent.__class__ = type(kind.__name__, (_Listened, kind), {"__call__": call})
    recurrent.conv1d.__class__ = type(conv_kind.__name__, (conv_kind,), {"__call__": convolve})


def slot_of(buffer: mx.array, slot: int) -> mx.array:
    """A copy of one slot, (1, ...); a slice would share the buffer."""
    return mx.take(buffer, mx.array([slot], mx.int32), axis=0)


def _window(conv_input: mx.array, taken: mx.array, length: int) -> mx.array:
    """The inputs before the first position not taken, (rows, length, channels)."""
    at = taken[:, None] + mx.arange(length, dtype=taken.dtype)
    return mx.take_along_axis(conv_input, at[:, :, None], axis=1)


def _like(rows: mx.array, array: mx.array) -> mx.array:
    """One value per row, laid out to meet `array`."""
    return rows.reshape(-1, *(1 for _ in array.shape[1:]))


def _with_first(buffer: mx.array, rows: mx.array) -> mx.array:
    if rows.shape[0] == buffer.shape[0]:
        return rows
    buffer[: rows.shape[0]] = rows
    return buffer


def _grown(buffer: mx.array, slots: int) -> mx.array:
    more = mx.zeros((slots - buffer.shape[0], *buffer.shape[1:]), buffer.dtype)
    return mx.concatenate([buffer, more])


def _replaced(buffer: mx.array, slot: int, row: mx.array) -> mx.array:
    buffer[slot : slot + 1] = row
    return buffer
