"""What a head should say, calculated in NumPy from its weights and from nothing of the product or of mlx-lm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Weights = Mapping[str, Floats]


class Shape(NamedTuple):
    """What the weights do not say."""

    query_heads: int
    key_heads: int
    head_size: int
    rotated: int
    """Of a head's numbers, the first so many."""
    theta: float
    eps: float
    experts_per_token: int = 0


def qwen_head(weights: Weights, embedding: Floats, hidden: Floats, tokens: list[int], shape: Shape) -> Floats:
    """Hidden states of the head, (positions, size), for the pairs of `hidden` (positions, size) and `tokens`."""
    embedded = rms(embedding[tokens], weights["pre_fc_norm_embedding.weight"], shape.eps)
    pair = np.concatenate([embedded, rms(hidden, weights["pre_fc_norm_hidden.weight"], shape.eps)], axis=-1)
    x = pair @ weights["fc.weight"].T
    layer = _below(weights, "layers.0.")
    x = x + _gated_attention(layer, rms(x, layer["input_layernorm.weight"], shape.eps), shape)
    x = x + _mlp(_below(layer, "mlp."), rms(x, layer["post_attention_layernorm.weight"], shape.eps), shape)
    return rms(x, weights["norm.weight"], shape.eps)


def mimo_head(weights: Weights, embedding: Floats, hidden: Floats, tokens: list[int], shape: Shape) -> Floats:
    """As `qwen_head`: the pair the other way round, no embedding at position 0, plain attention with biases."""
    embedded = embedding[tokens]
    embedded[0] = 0
    parts = [
        rms(hidden, weights["hidden_layernorm.weight"], shape.eps),
        rms(embedded, weights["token_layernorm.weight"], shape.eps),
    ]
    x = np.concatenate(parts, axis=-1) @ weights["input_proj.weight"].T
    attention = _below(weights, "self_attn.")
    seen = rms(x, weights["input_layernorm.weight"], shape.eps)
    queries, keys, values = (
        (seen @ attention[f"{part}_proj.weight"].T + attention[f"{part}_proj.bias"]).reshape(len(x), heads, -1)
        for part, heads in (("q", shape.query_heads), ("k", shape.key_heads), ("v", shape.key_heads))
    )
    x = x + _attend(_rotated(queries, shape), _rotated(keys, shape), values, shape) @ attention["o_proj.weight"].T
    x = x + _swiglu(_below(weights, "mlp."), rms(x, weights["post_attention_layernorm.weight"], shape.eps))
    return rms(x, weights["final_layernorm.weight"], shape.eps)


def rms(x: Floats, gain: Floats, eps: float) -> Floats:
    normed: Floats = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * gain
    return normed


def as_floats(weights: Mapping[str, Any]) -> dict[str, Floats]:
    return {name: np.array(array, np.float64) for name, array in weights.items()}


def _gated_attention(layer: Weights, x: Floats, shape: Shape) -> Floats:
    attention, count = _below(layer, "self_attn."), len(x)
    queries_and_gates = (x @ attention["q_proj.weight"].T).reshape(count, shape.query_heads, 2, shape.head_size)
    queries, gates = queries_and_gates[:, :, 0], queries_and_gates[:, :, 1].reshape(count, -1)
    keys, values = (
        (x @ attention[f"{part}_proj.weight"].T).reshape(count, shape.key_heads, shape.head_size) for part in "kv"
    )
    queries = rms(queries, attention["q_norm.weight"], shape.eps)
    keys = rms(keys, attention["k_norm.weight"], shape.eps)
    attended = _attend(_rotated(queries, shape), _rotated(keys, shape), values, shape)
    return (attended * _sigmoid(gates)) @ attention["o_proj.weight"].T


def _attend(queries: Floats, keys: Floats, values: Floats, shape: Shape) -> Floats:
    """(positions, heads * size); keys and values are shared by groups of query heads."""
    group = shape.query_heads // shape.key_heads
    outputs = []
    for head in range(shape.query_heads):
        scores = queries[:, head] @ keys[:, head // group].T / np.sqrt(shape.head_size)
        scores[np.triu_indices(len(scores), 1)] = -np.inf
        outputs.append(_softmax(scores) @ values[:, head // group])
    return np.concatenate(outputs, axis=-1)


def _rotated(x: Floats, shape: Shape) -> Floats:
    """Position is the index of the pair; halves of the rotated part turn together."""
    half = shape.rotated // 2
    angles = np.arange(len(x))[:, None] * shape.theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _mlp(mlp: Weights, x: Floats, shape: Shape) -> Floats:
    if "gate.weight" not in mlp:
        return _swiglu(mlp, x)
    share = _softmax(x @ mlp["gate.weight"].T)
    outputs = np.zeros_like(x)
    for place, row in enumerate(x):
        chosen = np.argsort(-share[place])[: shape.experts_per_token]
        for expert in chosen:
            one = {
                f"{part}_proj.weight": mlp[f"switch_mlp.{part}_proj.weight"][expert] for part in ("gate", "up", "down")
            }
            outputs[place] += share[place, expert] / share[place, chosen].sum() * _swiglu(one, row)
    return outputs + _sigmoid(x @ mlp["shared_expert_gate.weight"].T) * _swiglu(_below(mlp, "shared_expert."), x)


def _swiglu(mlp: Weights, x: Floats) -> Floats:
    gate = x @ mlp["gate_proj.weight"].T
    output: Floats = (gate * _sigmoid(gate) * (x @ mlp["up_proj.weight"].T)) @ mlp["down_proj.weight"].T
    return output


def _below(weights: Weights, prefix: str) -> dict[str, Floats]:
    return {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}


def _sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


def _softmax(x: Floats) -> Floats:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    shares: Floats = weights / weights.sum(axis=-1, keepdims=True)
    return shares
