"""Makes a wheel with a tiny llama in a GGUF file, as the default model comes, for tests of fetching."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from harness.models import CHAT_TEMPLATE, CONFIG, EOS_TOKEN_ID, SPECIAL_TOKENS, random_llama
from mtplx_core.models.fetch import ModelSource

NAME, VERSION = "tinywheel", "1.0"
_PLACES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_wheel(folder: Path, *, seed: int = 0) -> tuple[Path, ModelSource]:
    """The wheel, and the source that names it."""
    gguf = write_gguf(folder / "tiny.gguf", seed=seed)
    wheel = folder / f"{NAME}-{VERSION}-py3-none-any.whl"
    info = f"{NAME}-{VERSION}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, f"{NAME}/tiny.gguf")
        archive.writestr(f"{NAME}/__init__.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    gguf.unlink()
    return wheel, ModelSource("tiny", f"{NAME}=={VERSION}", digest)


def write_gguf(path: Path, *, seed: int) -> Path:
    mx.save_gguf(str(path), gguf_arrays(seed=seed), metadata())
    return path


def gguf_arrays(*, seed: int) -> dict[str, mx.array]:
    """The random llama with its rotary rows in GGUF's order."""
    weights: Any = tree_flatten(random_llama(seed=seed).parameters())
    arrays = {}
    for name, array in weights:
        if "q_proj" in name or "k_proj" in name:
            heads = CONFIG["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            out, width = array.shape
            array = array.reshape(heads, 2, out // heads // 2, width).swapaxes(1, 2).reshape(out, width)
        arrays[_gguf_name(name)] = mx.contiguous(array)
    return arrays


def metadata() -> dict[str, Any]:
    """What a converter writes beside the weights."""
    tokens = [*SPECIAL_TOKENS, "a", "b", "ab", "Ġ", "1", "2"]
    tokens += [f"x{index}" for index in range(CONFIG["vocab_size"] - len(tokens))]
    special = len(SPECIAL_TOKENS)
    return {
        "general.architecture": "llama",
        "llama.embedding_length": _number(CONFIG["hidden_size"]),
        "llama.block_count": _number(CONFIG["num_hidden_layers"]),
        "llama.feed_forward_length": _number(CONFIG["intermediate_size"]),
        "llama.attention.head_count": _number(CONFIG["num_attention_heads"]),
        "llama.attention.head_count_kv": _number(CONFIG["num_key_value_heads"]),
        "llama.attention.layer_norm_rms_epsilon": mx.array(CONFIG["rms_norm_eps"], mx.float32),
        "llama.vocab_size": _number(CONFIG["vocab_size"]),
        "llama.rope.freq_base": mx.array(CONFIG["rope_theta"], mx.float32),
        "llama.context_length": _number(CONFIG["max_position_embeddings"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": mx.array([3] * special + [1] * (len(tokens) - special), mx.int32),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": _number(1),
        "tokenizer.ggml.eos_token_id": _number(EOS_TOKEN_ID),
        "tokenizer.ggml.padding_token_id": _number(3),
        "tokenizer.ggml.unknown_token_id": _number(0),
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _gguf_name(name: str) -> str:
    stem, part = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{_PLACES[stem]}.{part}"
    _, _, layer, place = stem.split(".", 3)
    return f"blk.{layer}.{_PLACES[place]}.{part}"


def _number(value: int) -> mx.array:
    return mx.array(value, mx.uint32)
