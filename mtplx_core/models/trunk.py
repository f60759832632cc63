"""The trunk seen by the MTP lane: an mlx-lm model run through its own call, and the parts of it that heads use.

Owns nothing but the way to reach these parts and the check that the ragged cache can carry the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from mtplx_core.caches.attention import route_attention
from mtplx_core.caches.recurrent import LAYER_KINDS, listen_to
from mtplx_core.errors import ModelLoadError, UnsupportedModeError
from mtplx_core.models.grouped_masks import group_masks
from mtplx_core.models.own_call import OwnCall, Said

_HEAD_COUNTS = ("n_heads", "num_heads", "num_attention_heads", "n_head")
"""What mlx-lm's attention layers call the number of their query heads."""
_SHARING = frozenset({"mlx_lm.models.gemma4_text"})
"""The families whose last layers read other layers' keys with the offset and the mask of the whole forward."""


class Trunk:
    """An mlx-lm causal model whose every layer keeps a `KVCache`, a window of it, or the state of a gated delta net.

    Raises:
        UnsupportedModeError: the model has other recurrent layers, chunked or quantised caches.
    """

    def __init__(self, model: Any) -> None:
        reason = unsupported_reason(model)
        if reason is not None:
            raise UnsupportedModeError(f"mtp_batch cannot run this model: {reason}; use ar_batch")
        self.model = model
        self.args: Any = getattr(_text_model(model), "args", None)
        self.layers: Sequence[Any] = model.layers
        listen_to(self.layers)
        group_masks(model)
        route_attention(model)
        self._call = OwnCall(model)
        self.hidden_size = self._call.hidden_size
        self.vocab_size = self._call.vocab_size
        self.dtype = self._call.dtype
        self.query_heads = _query_heads(model)
        self.key_heads = min(int(getattr(self.args, "num_key_value_heads", None) or self.query_heads), self.query_heads)

    @property
    def final_norm_weight(self) -> mx.array:
        """Gains of the norm that hidden states come out of, (hidden,)."""
        weight: mx.array = self._part_of_body("norm").weight
        return weight

    def embed(self, tokens: mx.array) -> mx.array:
        """Embeddings as they are stored, (rows, positions, hidden)."""
        embedded: mx.array = self._part_of_body("embed_tokens")(tokens)
        return embedded

    def new_caches(self) -> list[Any]:
        """mlx-lm's own caches, for one row outside the batch."""
        return list(make_prompt_cache(self.model))

    def run(self, tokens: mx.array, cache: Sequence[Any] | None = None) -> Said:
        """Hidden states and logits of one forward over tokens, (rows, positions)."""
        return self._call(tokens, cache)

    def hidden(self, tokens: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        """Hidden states that logits are made of, (rows, positions, hidden)."""
        return self._call(tokens, cache).hidden

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits over the whole vocabulary; `hidden` must be row-contiguous or every row reads all weights."""
        return self._call.logits(hidden)

    def logits_of(self, token_ids: mx.array) -> Callable[[mx.array], mx.array]:
        """A function from hidden states to the logits of some tokens.

        Raises:
            ModelLoadError: the model's output layer does not keep one row per token.
        """
        return self._call.logits_of(token_ids)

    def _part_of_body(self, name: str) -> Any:
        part = getattr(self._call.body, name, None)
        if part is None:
            raise ModelLoadError(f"no head can be put on this model: it has no `{name}` where mlx-lm's models keep it")
        return part


def unsupported_reason(model: Any) -> str | None:
    """Why the ragged cache cannot carry this model, or None when it can."""
    layers, caches = list(model.layers), make_prompt_cache(model)
    owner = _text_model(model)
    # A tapped module has a class of our own, derived from the family's.
    modules = {kind.__module__ for kind in type(owner).__mro__}
    if len(layers) > len(caches) and not modules & _SHARING:
        return f"its {len(layers)} layers share {len(caches)} caches"
    layers += [None] * (len(caches) - len(layers))  # caches beyond the layers are those of a second pass
    foreign = sorted({type(c).__name__ for layer, c in zip(layers, caches, strict=False) if not _can_carry(layer, c)})
    if foreign:
        return (
            f"its layers keep {', '.join(foreign)}, and rows of different lengths need KVCache, RotatingKVCache "
            "that keeps no first tokens, or the state of Qwen's gated delta nets"
        )
    return None


def _can_carry(layer: Any, cache: Any) -> bool:
    """By the exact kind: what derives from a plain cache writes or masks in ways of its own."""
    if type(cache) is ArraysCache:
        return isinstance(getattr(layer, "linear_attn", None), LAYER_KINDS)
    if type(cache) is RotatingKVCache:
        return bool(cache.keep == 0)
    return type(cache) is KVCache


def trunk_fingerprint(model: Any) -> str:
    """Identity of the weights behind a model, the same for every dtype and quantisation of one artifact.

    Normalisation weights are never quantised, and rounding them to bfloat16 hides the dtype they are kept in.
    """
    digest = hashlib.sha256()
    weights: Any = tree_flatten(model.parameters())
    for name, weight in sorted(weights):
        if weight.ndim == 1 and "norm" in name:
            digest.update(name.encode())
            rounded = weight.astype(mx.bfloat16).view(mx.uint16)
            digest.update(bytes(memoryview(rounded)))
    return digest.hexdigest()[:24]


def _query_heads(model: Any) -> int:
    """Query heads of the attention layers; 1, to which every mask can be laid out, where layers differ in them."""
    named = [getattr(part, name, None) for part in model.modules() for name in _HEAD_COUNTS]
    counts = {count for count in named if isinstance(count, int)}
    return counts.pop() if len(counts) == 1 else 1


def _text_model(model: Any) -> Any:
    return getattr(model, "language_model", model)
