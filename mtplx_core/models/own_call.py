"""A model's own call, parted where its hidden states become logits.

Families differ in what they do between the two: scales, soft caps, an output layer of their own. Nothing of that is
rebuilt here. Hidden states are noted while the model's own call runs, and logits are that same call with its body
standing aside. Arrays are lazy, so a half that is not asked for costs no more than its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mtplx_core.errors import ModelLoadError

_OF_A_ROW = ("weight", "scales", "biases", "bias")
"""Parts of an output layer, plain or quantised, that have one row per token of the vocabulary."""


class Said(NamedTuple):
    """What one call of a model gives."""

    hidden: mx.array
    """(rows, positions, hidden); the logits where the model has no body of its own."""
    logits: mx.array
    """(rows, positions, vocabulary)"""


def logits_in_one_forward(model: Any, tokens: mx.array) -> mx.array:
    """What a model says behind each of some tokens, (rows, positions, vocabulary).

    With fresh caches, since layers that share keys find them there alone.
    """
    return _run(model, tokens, make_prompt_cache(model))


class OwnCall:
    """An mlx-lm text model, entered only through its own `__call__`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._tap, said = _find_body(model)
        self.body: Any = None if self._tap is None else self._tap.module
        """The module whose output the logits are made of; None where no module ends in hidden states."""
        self.hidden_size = int(said.hidden.shape[-1])
        self.vocab_size = int(said.logits.shape[-1])
        self.dtype: mx.Dtype = said.hidden.dtype

    def __call__(self, tokens: mx.array, caches: Sequence[Any] | None = None) -> Said:
        """Run the model over tokens, (rows, positions)."""
        if self._tap is None:
            logits = _run(self._model, tokens, caches)
            return Said(logits, logits)
        with self._tap.listening():
            logits = _run(self._model, tokens, caches)
            return Said(self._tap.heard, logits)

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits of hidden states, (rows, positions, vocabulary)."""
        if self._tap is None:
            return hidden
        with self._tap.standing_aside(hidden):
            return _run(self._model, mx.zeros(hidden.shape[:2], mx.int32), None)

    def logits_of(self, token_ids: mx.array) -> Callable[[mx.array], mx.array]:
        """A function from hidden states to the logits of some tokens, which reads no other token's weights.

        Raises:
            ModelLoadError: the model's output layer does not keep one row per token.
        """
        layer = self._output_layer()
        rows = {name: layer[name][token_ids] for name in _OF_A_ROW if layer.get(name) is not None}
        mx.eval(rows)

        def project(hidden: mx.array) -> mx.array:
            with _replaced(layer, rows):
                return self.logits(hidden)

        return project

    def _output_layer(self) -> Any:
        """The layer that a token's logit comes out of: with one row left in it, one logit is left."""
        hidden = mx.zeros((1, 1, self.hidden_size), self.dtype)
        for layer in self._model.modules():
            if "weight" not in layer or layer["weight"].shape[0] != self.vocab_size:
                continue
            first = {name: layer[name][:1] for name in _OF_A_ROW if layer.get(name) is not None}
            with _replaced(layer, first):
                if self._narrows(hidden):
                    return layer
        raise ModelLoadError("its output layer is not one that a head can take some tokens of")

    def _narrows(self, hidden: mx.array) -> bool:
        try:
            return bool(self.logits(hidden).shape[-1] == 1)
        except (ValueError, IndexError):  # what comes behind the layer counts on the whole vocabulary
            return False


class _Tap:
    """Stands between a module and what calls it."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.heard: Any = None
        """What the module returned."""
        self._is_listening = False
        self._given: mx.array | None = None

    def pass_on(self, call: Callable[[], Any]) -> Any:
        if self._given is not None:
            return self._given
        returned = call()
        if self._is_listening:
            self.heard = returned
        return returned

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note what the module returns, within the block only: it would keep a whole forward's arrays alive."""
        self._is_listening = True
        try:
            yield
        finally:
            self._is_listening, self.heard = False, None

    @contextmanager
    def standing_aside(self, hidden: mx.array) -> Iterator[None]:
        """Let the module return `hidden`, whatever it is called with."""
        self._given = hidden
        try:
            yield
        finally:
            self._given = None


class _Tapped:
    """Marks a module that has a tap."""

    tap: _Tap


def _find_body(model: Any) -> tuple[_Tap | None, Said]:
    """The outermost module around the layers that returns something other than the logits, and what it returns.

    Wrappers, such as those around a vision model's text part, return what their text model does.
    """
    path = _path_to(model.layers[0], model)
    taps = [_tap(module) for module in path]
    tokens = mx.zeros((1, 1), mx.int32)
    for tap in taps:
        with tap.listening():
            logits = _run(model, tokens, None)
            if isinstance(tap.heard, mx.array) and tap.heard is not logits:
                return tap, Said(tap.heard, logits)
    logits = _run(model, tokens, None)
    return None, Said(logits, logits)


def _path_to(layer: Any, module: Any) -> list[Any]:
    """The modules around a layer, outermost first, without `module` itself."""
    children: Any = tree_flatten(module.children(), is_leaf=lambda part: isinstance(part, Module))
    for _, child in children:
        if child is layer:
            return []
        if any(part is layer for part in child.modules()):
            return [child, *_path_to(layer, child)]
    return []


def _tap(module: Any) -> _Tap:
    """The module's tap, which it is given now where it has none; nothing else about the module changes."""
    kind = type(module)
    if isinstance(module, _Tapped):
        return module.tap
    tap = _Tap(module)

    def call(self: Any, *given: Any, **named: Any) -> Any:
        return tap.pass_on(lambda: kind.__call__(self, *given, **named))

    module.__class__ = type(kind.__name__, (_Tapped, kind), {"__call__": call, "tap": tap})
    return tap


def _run(model: Any, tokens: mx.array, caches: Sequence[Any] | None) -> mx.array:
    """By keyword: families disagree about what comes second."""
    logits: mx.array = model(tokens) if caches is None else model(tokens, cache=caches)
    return logits


@contextmanager
def _replaced(layer: Any, parts: dict[str, mx.array]) -> Iterator[None]:
    """Give a layer other arrays within the block."""
    kept = {name: layer[name] for name in parts}
    dict.update(layer, parts)
    try:
        yield
    finally:
        dict.update(layer, kept)
