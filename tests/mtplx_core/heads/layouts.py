"""Tiny random checkpoints with heads, written in the layouts they are published and converted in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import mimo, qwen3_5, qwen3_5_moe, qwen3_next

from harness.models import VOCAB_SIZE, tokenizer_texts
from mtplx_core.heads.mimo import MimoHead
from mtplx_core.heads.qwen import NORMS, QwenHead
from mtplx_core.models.loader import LoadedModel
from mtplx_core.models.trunk import Trunk

nn: Any = mlx.nn

Weights = dict[str, mx.array]

SIZE, EXPERTS = 64, 4
ATTENTION: dict[str, Any] = {
    "hidden_size": SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
GATED_DELTA: dict[str, Any] = {
    "full_attention_interval": 2,
    "head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
MIXTURE: dict[str, Any] = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DENSE: dict[str, Any] = {"model_type": "qwen3_5", **ATTENTION, **GATED_DELTA}
EXPERTS_35: dict[str, Any] = {"model_type": "qwen3_5_moe", **ATTENTION, **GATED_DELTA, **MIXTURE}
NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    **ATTENTION,
    **GATED_DELTA,
    **MIXTURE,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
}
MIMO: dict[str, Any] = {"model_type": "mimo", **ATTENTION, "num_nextn_predict_layers": 1}
TRUNK_NORMS = (
    "model.norm.weight",
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)
"""Of mlx-lm's names."""


class Tiny(NamedTuple):
    """A trunk and its head, random and in memory: what a checkpoint is written from."""

    config: dict[str, Any]
    model: Any
    head: Any

    @property
    def trunk_weights(self) -> Weights:
        return dict(tree_flatten(self.model.parameters()))

    @property
    def head_weights(self) -> Weights:
        """True gains, experts stacked."""
        return dict(tree_flatten(self.head.parameters()))


def tiny(config: dict[str, Any]) -> Tiny:
    """Wide random matrices, so that answers neither loop at once nor hang on ties; gains about one."""
    kinds: dict[str, Any] = {"qwen3_5": qwen3_5, "qwen3_5_moe": qwen3_5_moe, "qwen3_next": qwen3_next, "mimo": mimo}
    kind = kinds[config["model_type"]]
    model = kind.Model(kind.ModelArgs.from_dict(dict(config)))
    model.eval()
    randomise(model, seed=0)
    trunk = Trunk(model)
    is_mixture = config.get("num_experts", 0) > 0
    head = MimoHead(trunk) if kind is mimo else QwenHead(trunk, has_experts=is_mixture)
    randomise(head, seed=1)
    head.eval()
    return Tiny(config, model, head)


def randomise(module: Any, *, seed: int, width: float = 0.25) -> None:
    keys = iter(mx.random.split(mx.random.key(seed), 256))

    def fresh(array: mx.array) -> mx.array:
        noise = mx.random.normal(array.shape, key=next(keys))
        return width * noise if array.ndim > 1 else 1.0 + 0.1 * noise

    module.update(tree_map(fresh, module.parameters()))
    mx.eval(module.parameters())


def loaded_of(made: Tiny, path: Path = Path("/nonexistent/tiny")) -> LoadedModel:
    """The model without a detour over the disk."""
    return LoadedModel(
        model=made.model,
        path=path,
        name="tiny",
        identity="tiny@000000000000",
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({2}),
        max_context=made.config["max_position_embeddings"],
        tokenizer_files={},
        config=made.config,
        dtype=mx.float32,
    )


def write(folder: Path, made: Tiny, trunk: Weights, files: dict[str, Weights], **more: Any) -> Path:
    """A checkpoint of a trunk and further files of weights; those named like the trunk's go with it."""
    folder.mkdir(parents=True, exist_ok=True)
    together = {"model.safetensors": trunk} | files
    if "model.safetensors" in files:
        together["model.safetensors"] = trunk | files["model.safetensors"]
    for name, weights in together.items():
        (folder / name).parent.mkdir(exist_ok=True)
        mx.save_safetensors(str(folder / name), weights)
    (folder / "config.json").write_text(json.dumps({**made.config, **more}))
    for name, text in tokenizer_texts().items():
        (folder / name).write_text(text)
    return folder


def unconverted(made: Tiny) -> Weights:
    """The trunk as published: other names, convolutions on their side, norms less one, experts as the family has them.

    Qwen3-Next has its experts one by one, the later ones fused.
    """
    published: Weights = {}
    for name, array in made.trunk_weights.items():
        is_norm = name.endswith(TRUNK_NORMS)
        if name.endswith("conv1d.weight"):
            array = array.moveaxis(2, 1)
        name = name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_", "lm_")
        published[name] = array - 1 if is_norm else array
    return one_by_one(published) if made.config["model_type"] == "qwen3_next" else fused(published)


def one_by_one(weights: Weights) -> Weights:
    """`experts.3.up_proj.weight`"""
    return _expanded(
        weights,
        lambda prefix, projection, stack: {
            f"{prefix}.experts.{expert}.{projection}": stack[expert] for expert in range(stack.shape[0])
        },
    )


def fused(weights: Weights) -> Weights:
    """`experts.gate_up_proj`, gate first, without `.weight`"""
    done = dict(weights)
    for name in [name for name in weights if ".switch_mlp.gate_proj" in name]:
        prefix = name[: name.index(".switch_mlp")]
        part = name.rsplit("gate_proj.", 1)[1]
        gate, up, down = (done.pop(f"{prefix}.switch_mlp.{which}_proj.{part}") for which in ("gate", "up", "down"))
        suffix = "" if part == "weight" else f".{part}"
        done[f"{prefix}.experts.gate_up_proj{suffix}"] = mx.concatenate([gate, up], axis=-2)
        done[f"{prefix}.experts.down_proj{suffix}"] = down
    return done


def less_one(head: Weights) -> Weights:
    """The head's norms as published."""
    return {name: array - 1 if name in NORMS else array for name, array in head.items()}


def under(prefix: str, weights: Weights) -> Weights:
    return {prefix + name: array for name, array in weights.items()}


def quantised(module: Any, *, bits: int = 4, group_size: int = 32) -> Weights:
    """A module's weights after mlx-lm's conversion; the module itself is changed."""
    nn.quantize(module, group_size=group_size, bits=bits)
    return dict(tree_flatten(module.parameters()))


def _expanded(weights: Weights, expand: Callable[[str, str, mx.array], Weights]) -> Weights:
    done: Weights = {}
    for name, array in weights.items():
        if ".switch_mlp." in name:
            prefix, projection = name.split(".switch_mlp.")
            done |= expand(prefix, projection, array)
        else:
            done[name] = array
    return done
