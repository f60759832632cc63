"""Maps a llama GGUF file onto the folder format of mlx-lm: weights and config. The tokenizer is `gguf_tokenizer`'s.

Weights stay on the file's own grid: kept packed (4 bits, the embedding 8, in groups of 32) or unpacked to
float32, never re-quantised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from mtplx_core.errors import ModelLoadError
from mtplx_core.models.gguf_tokenizer import tokenizer_files

WeightFormat = Literal["float32", "4bit"]

GROUP_SIZE = 32
BITS = 4

_PLACES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(gguf: Path, folder: Path, *, weight_format: WeightFormat) -> None:
    """Write `gguf` as an mlx-lm folder into the existing, empty `folder`.

    Raises:
        ModelLoadError: not a llama, or a part of it is not known here.
    """
    loaded: Any = mx.load(str(gguf), return_metadata=True)
    arrays, metadata = loaded
    if metadata.get("general.architecture") != "llama":
        raise ModelLoadError(f"{gguf.name}: architecture {metadata.get('general.architecture')!r}, not llama")
    weights, config = mlx_lm_format(arrays, metadata, weight_format=weight_format)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    for name, text in tokenizer_files(metadata).items():
        (folder / name).write_text(text, encoding="utf-8")


def mlx_lm_format(
    arrays: Mapping[str, mx.array], metadata: Mapping[str, Any], *, weight_format: WeightFormat
) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Weights and config as mlx-lm's llama loads them."""
    config = llama_config(metadata, tied="output.weight" not in arrays)
    weights = llama_weights(arrays, config)
    if weight_format == "float32":
        return _unpack(weights), {**config, "torch_dtype": "float32"}
    weights = _halve(weights)
    return weights, {**config, "torch_dtype": "float16", "quantization": _quantization(weights)}


def llama_config(metadata: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """The config.json of mlx-lm's llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": metadata["llama.embedding_length"].item(),
        "num_hidden_layers": metadata["llama.block_count"].item(),
        "intermediate_size": metadata["llama.feed_forward_length"].item(),
        "num_attention_heads": metadata["llama.attention.head_count"].item(),
        "num_key_value_heads": metadata["llama.attention.head_count_kv"].item(),
        "rms_norm_eps": round(metadata["llama.attention.layer_norm_rms_epsilon"].item(), 10),
        "vocab_size": metadata["llama.vocab_size"].item(),
        "rope_theta": metadata["llama.rope.freq_base"].item(),
        "max_position_embeddings": metadata["llama.context_length"].item(),
        "tie_word_embeddings": tied,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"].item(),
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"].item(),
    }


def llama_weights(arrays: Mapping[str, mx.array], config: Mapping[str, Any]) -> dict[str, mx.array]:
    """The arrays under mlx-lm's names, rotary rows back in their order, still packed."""
    weights: dict[str, mx.array] = {}
    for name, array in arrays.items():
        stem, place, part = _split_name(name)
        if stem == "attn_q":
            array = _unpermute(array, config["num_attention_heads"])
        elif stem == "attn_k":
            array = _unpermute(array, config["num_key_value_heads"])
        weights[f"{place}.{part}"] = array
    return weights


def _split_name(name: str) -> tuple[str, str, str]:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|scales|biases)", name)
    if match is None or match[2] not in _PLACES:
        raise ModelLoadError(f"GGUF tensor {name!r} has no place in mlx-lm's llama")
    prefix = f"model.layers.{match[1]}." if match[1] is not None else ""
    return match[2], prefix + _PLACES[match[2]], match[3]


def _unpermute(rows: mx.array, heads: int) -> mx.array:
    """GGUF interleaves the two halves of each head's rotary rows; mlx-lm wants half after half."""
    out, width = rows.shape
    return rows.reshape(heads, out // heads // 2, 2, width).swapaxes(1, 2).reshape(out, width)


def _unpack(packed: Mapping[str, mx.array]) -> dict[str, mx.array]:
    plain: dict[str, mx.array] = {}
    for name, array in packed.items():
        stem, _, part = name.rpartition(".")
        if part != "weight":
            continue
        scales = packed.get(f"{stem}.scales")
        if scales is not None:
            # Float32 scales give float32 weights: nothing is rounded on the way.
            scales, biases = scales.astype(mx.float32), packed[f"{stem}.biases"].astype(mx.float32)
            array = mx.dequantize(array, scales, biases, group_size=GROUP_SIZE, bits=_bits(array, scales))
        plain[name] = array.astype(mx.float32)
    return plain


def _halve(packed: Mapping[str, mx.array]) -> dict[str, mx.array]:
    return {n: a.astype(mx.float16) if a.dtype == mx.float32 else a for n, a in packed.items()}


def _quantization(packed: Mapping[str, mx.array]) -> dict[str, Any]:
    """mlx-lm's quantisation entry: the common format, and each module that differs from it."""
    settings: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": BITS}
    for name, scales in packed.items():
        stem, _, part = name.rpartition(".")
        if part == "scales" and (bits := _bits(packed[f"{stem}.weight"], scales)) != BITS:
            settings[stem] = {"group_size": GROUP_SIZE, "bits": bits}
    return settings


def _bits(weight: mx.array, scales: mx.array) -> int:
    return int(weight.shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE))
