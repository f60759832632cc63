"""Writes a family's tiny random checkpoint the way a published one lies in a folder."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import _get_classes

from harness.families.configs import CONTEXT_ELSEWHERE, NESTED, OWN
from harness.families.sizes import CONTEXT, USUAL
from harness.models import tokenizer_texts

EOS_TOKEN_ID = 2
NEEDS_GPU = {"bitnet", "muse_spark"}
"""Families whose layers are kernels for a GPU."""
NOT_HERE: dict[str, str] = {
    **dict.fromkeys(NEEDS_GPU, "its kernels need a GPU"),
    "olmo": "mlx-lm's module for it ends the process without the package ai2-olmo",
}
"""Families that mlx-lm cannot build on a CPU with this project's requirements; OLMo's must not even be imported."""
NOT_TIED = {"baichuan_m1", "minicpm", "qwen3_vl_moe"}
"""Families whose configuration may tie embeddings and whose weights mlx-lm cannot load then."""
GAIN = 2.0
"""Standard deviation of what a random matrix makes of a normalised vector."""


def families() -> list[str]:
    """Return the names of mlx-lm's modules that define a model."""
    names = [module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)]
    return [name for name in names if name in NOT_HERE or hasattr(_module(name), "Model")]


def config_of(family: str, *, is_tied: bool | None = None) -> dict[str, Any]:
    """Return the family's tiny configuration under the keys it is published with."""
    config: dict[str, Any] = {"model_type": family, "eos_token_id": EOS_TOKEN_ID, "bos_token_id": 1}
    if family in NESTED:
        own = OWN.get(family, {})
        config |= own
        text = NESTED[family]
        name, _, kind = text.partition(":")
        args = getattr(_module(name), kind or "ModelArgs")
        part = {"model_type": name} | _filled(args, text) | own.get("text_config", {})
        config["text_config"] = part
    else:
        config |= _filled(_module(family).ModelArgs, family)
        part = config
    if family not in CONTEXT_ELSEWHERE:
        part["max_position_embeddings"] = CONTEXT
    if is_tied is not None:
        part["tie_word_embeddings"] = is_tied
    return config


def can_tie(family: str) -> bool:
    """Return whether the family's configuration says if embeddings are tied."""
    name, _, kind = NESTED.get(family, family).partition(":")
    return "tie_word_embeddings" in _fields(getattr(_module(name), kind or "ModelArgs"))


def write_checkpoint(folder: Path, family: str, *, is_tied: bool | None = None, seed: int = 0) -> Path:
    """Write configuration, random float32 weights and a byte-level tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(family, is_tied=is_tied)
    kind, args_kind = _get_classes(json.loads(json.dumps(config)))
    model: Any = kind(args_kind.from_dict(json.loads(json.dumps(config))))
    weights = random_weights(model, seed=seed)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name, text in tokenizer_texts().items():
        (folder / name).write_text(text)
    return folder


def random_weights(model: Any, *, seed: int) -> dict[str, mx.array]:
    """Return weights under which logits spread and recurrent states last for some tokens."""
    keys = _keys(seed)
    drawn = tree_map_with_path(lambda name, array: _random(name, array, next(keys)), model.parameters())
    weights: dict[str, mx.array] = dict(tree_flatten(drawn))
    mx.eval(weights)
    return weights


def _random(name: str, array: mx.array, key: mx.array) -> mx.array:
    if array.dtype == mx.uint32:  # packed
        return mx.random.randint(0, 2**31 - 1, array.shape, key=key).astype(mx.uint32)
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    noise = mx.random.normal(array.shape, key=key)
    last = name.rsplit(".", 1)[-1]
    if last in {"A_log", "dt_bias"}:
        return 0.3 * noise - 1.0
    if last == "scales":
        return (0.1 * noise).astype(array.dtype)
    if array.ndim <= 1 or last in {"D", "sinks"} or "bias" in last:
        return 0.1 * noise if "bias" in last else 1.0 + 0.1 * noise
    fan_in = array.shape[1] if "conv" in name and array.ndim == 3 else array.shape[-1]
    scaled: mx.array = noise * (GAIN / float(fan_in) ** 0.5)
    return scaled


def _keys(seed: int) -> Iterator[mx.array]:
    key = mx.random.key(seed)
    while True:
        key, drawn = mx.random.split(key)
        yield drawn


def _filled(args: Any, text: str) -> dict[str, Any]:
    usual = {name: USUAL[name] for name in _fields(args) if name in USUAL}
    return {**usual, **OWN.get(text, {})}


def _fields(args: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(args)]


def _module(name: str) -> Any:
    return importlib.import_module(f"mlx_lm.models.{name}")
