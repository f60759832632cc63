"""The head inside Qwen3-Next, Qwen3.5 and Qwen3.6 checkpoints, dense or mixture of experts.

One full-attention decoder layer of the trunk's kind between a projection and a norm; embedding and unembedding are the
trunk's. Where its tensors lie in a checkpoint is `tensors`' business, how norms are stored `norms`'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn
from mlx_lm.models.base import create_attention_mask

from mtplx_core.errors import ModelLoadError
from mtplx_core.heads.experts import has_experts, stacked_experts
from mtplx_core.heads.filling import fill
from mtplx_core.heads.norms import Convention, likely_conventions, true_gain
from mtplx_core.heads.tensors import Tensors
from mtplx_core.models.trunk import Trunk

nn: Any = mlx.nn

PREFIXES = ("model.language_model.mtp.", "language_model.mtp.", "model.mtp.", "mtp.")
MODEL_TYPES = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
NORMS = (
    "pre_fc_norm_embedding.weight",
    "pre_fc_norm_hidden.weight",
    "norm.weight",
    "layers.0.input_layernorm.weight",
    "layers.0.post_attention_layernorm.weight",
    "layers.0.self_attn.q_norm.weight",
    "layers.0.self_attn.k_norm.weight",
)
UNCLEAR_NORMS = NORMS[:2]
"""Their true gains are far below one, .27 and .49 in published models."""


class QwenHead(nn.Module):  # type: ignore[misc]  # mlx.nn carries no types
    """norm(layer(fc([norm(embedding of t + 1), norm(hidden at t)]))), unembedded over the whole vocabulary.

    Args:
        trunk: gives embedding, unembedding and the kind of layer.
        has_experts: whether the layer is a mixture.
    """

    name = "native"
    max_depth = 3
    """It is trained for one token and is fed its own state for more."""
    cached_layers = 1

    def __init__(self, trunk: Trunk, *, has_experts: bool) -> None:
        super().__init__()
        size, eps = trunk.hidden_size, float(trunk.args.rms_norm_eps)
        self.pre_fc_norm_embedding = nn.RMSNorm(size, eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = [_new_layer(trunk, has_experts=has_experts)]
        self.norm = nn.RMSNorm(size, eps)
        self._trunk = trunk
        self._draft_ids = mx.arange(trunk.vocab_size, dtype=mx.int32)

    @property
    def draft_ids(self) -> mx.array:
        return self._draft_ids

    def __call__(
        self, hidden: mx.array, tokens: mx.array, cache: list[Any] | None = None, mask: Any = "causal"
    ) -> mx.array:
        embedded = self.pre_fc_norm_embedding(self._trunk.embed(tokens))
        x = self.fc(mx.concatenate([embedded, self.pre_fc_norm_hidden(hidden)], axis=-1))
        own = None if cache is None else cache[0]
        seen = mask if own is None else create_attention_mask(x, own)
        predicted: mx.array = self.norm(self.layers[0](x, seen, own))
        return predicted

    def logits(self, hidden: mx.array) -> mx.array:
        return self._trunk.logits(hidden)


class StoredQwenHead:
    """A Qwen head as a checkpoint holds it, to be read under one norm convention or another.

    Raises:
        ModelLoadError: the checkpoint's head is of a kind that is not run here, or incomplete.
    """

    def __init__(self, trunk: Trunk, tensors: Tensors, config: Mapping[str, Any]) -> None:
        require_known_kind(config)
        stacked = stacked_experts(tensors)
        self._stored = {name: stacked[name] for name in NORMS if name in stacked}
        self._dtype = trunk.dtype
        self.head = QwenHead(trunk, has_experts=has_experts(stacked))
        fill(self.head, stacked, dtype=trunk.dtype)
        self.conventions = conventions(self._stored)

    def read_as(self, convention: Convention) -> None:
        """Set the head's norms to what is stored, read this way."""
        gains = [(name, true_gain(w, is_raw=name in convention.raw)) for name, w in self._stored.items()]
        self.head.load_weights([(name, gain.astype(self._dtype)) for name, gain in gains], strict=False)


def conventions(tensors: Tensors) -> list[Convention]:
    """How the norms among a head's tensors may be meant, likeliest first."""
    gains = {name: tensors[name] for name in NORMS if name in tensors}
    return likely_conventions(gains, unclear=UNCLEAR_NORMS)


def require_known_kind(config: Mapping[str, Any]) -> None:
    """Refuse what the configuration says and the weights might not show.

    Raises:
        ModelLoadError: what is unknown about it.
    """
    if config.get("mtp_use_dedicated_embeddings"):
        raise ModelLoadError("the head has embeddings of its own (mtp_use_dedicated_embeddings), which are not run")
    layers = config.get("mtp_num_hidden_layers", 1)
    if layers != 1:
        raise ModelLoadError(f"the head has {layers} layers (mtp_num_hidden_layers), one is run")


def _new_layer(trunk: Trunk, *, has_experts: bool) -> Any:
    """An empty layer at a place where the trunk's own would have full attention and that kind of MLP."""
    args = trunk.args
    if not has_experts:
        args = replace(args, num_experts=0)
    elif hasattr(args, "mlp_only_layers"):
        args = replace(args, mlp_only_layers=[], decoder_sparse_step=1)
    return type(trunk.layers[0])(args, layer_idx=args.full_attention_interval - 1)
