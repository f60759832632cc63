"""The head inside MiMo checkpoints: the pair the other way round, and no embedding at the first position."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import mlx.nn
from mlx_lm.models.base import create_attention_mask

from mtplx_core.heads.filling import fill
from mtplx_core.heads.tensors import Tensors
from mtplx_core.models.trunk import Trunk

nn: Any = mlx.nn

PREFIXES = ("model.mtp_layers.",)
MODEL_TYPES = ("mimo",)
_OUTER = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
"""What does not belong to the decoder layer, which shares its level of names with these."""


class MimoHead(nn.Module):  # type: ignore[misc]  # mlx.nn carries no types
    """norm(layer(proj([norm(hidden at t), norm(embedding of t + 1)]))), unembedded over the whole vocabulary."""

    name = "native"
    max_depth = 1
    cached_layers = 1

    def __init__(self, trunk: Trunk) -> None:
        super().__init__()
        size, eps = trunk.hidden_size, float(trunk.args.rms_norm_eps)
        self.token_layernorm = nn.RMSNorm(size, eps)
        self.hidden_layernorm = nn.RMSNorm(size, eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = type(trunk.layers[0])(trunk.args)
        self.final_layernorm = nn.RMSNorm(size, eps)
        self._trunk = trunk
        self._draft_ids = mx.arange(trunk.vocab_size, dtype=mx.int32)

    @property
    def draft_ids(self) -> mx.array:
        return self._draft_ids

    def __call__(
        self, hidden: mx.array, tokens: mx.array, cache: list[Any] | None = None, mask: Any = "causal"
    ) -> mx.array:
        own = None if cache is None else cache[0]
        embedded = self._trunk.embed(tokens)
        # It was trained without an embedding in its first pair.
        embedded = mx.where(_positions(own, tokens)[:, :, None] == 0, 0, embedded)
        pair = mx.concatenate([self.hidden_layernorm(hidden), self.token_layernorm(embedded)], axis=-1)
        x = self.input_proj(pair)
        seen = mask if own is None else create_attention_mask(x, own)
        predicted: mx.array = self.final_layernorm(self.layer(x, seen, own))
        return predicted

    def logits(self, hidden: mx.array) -> mx.array:
        return self._trunk.logits(hidden)


def load_mimo_head(trunk: Trunk, tensors: Tensors) -> MimoHead:
    """The first of the checkpoint's heads; further ones were trained to follow it and are not run.

    Raises:
        ModelLoadError: it is incomplete.
    """
    head = MimoHead(trunk)
    # A file of one head alone may leave its number out.
    first = {name.removeprefix("0."): tensor for name, tensor in tensors.items() if not re.match(r"[1-9]\d*\.", name)}
    fill(head, {_own_name(name): tensor for name, tensor in first.items()}, dtype=trunk.dtype)
    return head


def _own_name(name: str) -> str:
    return name if name.split(".")[0] in _OUTER else f"layer.{name}"


def _positions(own: Any, tokens: mx.array) -> mx.array:
    """(rows or 1, positions)"""
    steps = mx.arange(tokens.shape[1], dtype=mx.int32)[None]
    if own is None:
        return steps
    return steps + (own.offset[:, None] if isinstance(own.offset, mx.array) else own.offset)
