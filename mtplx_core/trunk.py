"""The trunk seen by the MTP lane: an mlx-lm model taken apart into embedding, hidden states and unembedding.

Owns nothing but the way to reach these parts and the check that the ragged cache can carry the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from mtplx_core.errors import UnsupportedModeError
from mtplx_core.recurrent import LAYER_KINDS, listen_to
from mtplx_core.unfused_attention import route_attention

_SHARING = frozenset({"mlx_lm.models.gemma4_text"})
"""The families whose last layers read other layers' keys with the offset and the mask of the whole forward."""


class Trunk:
    """An mlx-lm causal model whose every layer keeps a `KVCache`, a window of it, or the state of a gated delta net.

    Raises:
        UnsupportedModeError: the model has other recurrent layers, chunked or quantised caches, or parts that are not
            where mlx-lm's models keep them.
    """

    def __init__(self, model: Any) -> None:
        reason = unsupported_reason(model)
        if reason is not None:
            raise UnsupportedModeError(f"mtp_batch cannot run this model: {reason}; use ar_batch")
        owner = _text_model(model)
        self.model = model
        self._body: Any = owner.model
        self._unembedding: Any = getattr(owner, "lm_head", None) or owner.model.embed_tokens
        self.args: Any = owner.args
        self.layers: Sequence[Any] = model.layers
        listen_to(self.layers)
        route_attention(model)
        self.hidden_size = int(owner.args.hidden_size)
        self.vocab_size = int(owner.args.vocab_size)
        self.query_heads = int(owner.args.num_attention_heads)
        self.key_heads = int(getattr(owner.args, "num_key_value_heads", None) or self.query_heads)
        self.dtype: mx.Dtype = self.embed(mx.zeros((1, 1), mx.int32)).dtype

    @property
    def final_norm_weight(self) -> mx.array:
        weight: mx.array = self._body.norm.weight
        return weight

    def embed(self, tokens: mx.array) -> mx.array:
        """Embeddings, (rows, positions, hidden)."""
        embedded: mx.array = self._body.embed_tokens(tokens)
        return embedded

    def new_caches(self) -> list[Any]:
        """mlx-lm's own caches, for one row outside the batch."""
        return list(make_prompt_cache(self.model))

    def hidden(self, tokens: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        """Hidden states after the final norm, (rows, positions, hidden)."""
        states: mx.array = self._body(tokens, cache)
        return states

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits over the whole vocabulary; `hidden` must be row-contiguous or every row reads all weights."""
        if hasattr(self._unembedding, "as_linear"):
            logits: mx.array = self._unembedding.as_linear(hidden)
        else:
            logits = self._unembedding(hidden)
        return logits

    def unembedding_rows(self, token_ids: mx.array) -> Callable[[mx.array], mx.array]:
        """The unembedding restricted to some tokens: a function from hidden states to their logits."""
        layer = self._unembedding
        rows = layer.weight[token_ids]
        if "scales" not in layer:
            transposed = rows.T  # (hidden, tokens)
            mx.eval(transposed)
            return lambda hidden: hidden @ transposed
        scales = layer.scales[token_ids]
        biases = layer.biases[token_ids] if layer.biases is not None else None
        mx.eval(rows, scales)

        def project(hidden: mx.array) -> mx.array:
            return mx.quantized_matmul(
                hidden, rows, scales, biases, transpose=True, group_size=layer.group_size, bits=layer.bits
            )

        return project


def unsupported_reason(model: Any) -> str | None:
    """Why the ragged cache cannot carry this model, or None when it can."""
    layers, caches = list(model.layers), make_prompt_cache(model)
    owner = _text_model(model)
    if len(layers) > len(caches) and type(owner).__module__ not in _SHARING:
        return f"its {len(layers)} layers share {len(caches)} caches"
    layers += [None] * (len(caches) - len(layers))  # caches beyond the layers are those of a second pass
    foreign = sorted({type(c).__name__ for layer, c in zip(layers, caches, strict=False) if not _can_carry(layer, c)})
    if foreign:
        return (
            f"its layers keep {', '.join(foreign)}, and rows of different lengths need KVCache, RotatingKVCache "
            "that keeps no first tokens, or the state of Qwen's gated delta nets"
        )
    if not hasattr(owner, "model") or not hasattr(owner.model, "embed_tokens") or not hasattr(owner, "args"):
        return "its embedding and layers are not where mlx-lm's text models keep them"
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


def _text_model(model: Any) -> Any:
    return getattr(model, "language_model", model)
