"""A GGUF file becomes the model and tokenizer it was made from. Engine: none; model: tiny random llama."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tokenizers import Tokenizer

from harness.models import CHAT_TEMPLATE, CONFIG, EOS_TOKEN_ID, random_llama
from mtplx_core.errors import ModelLoadError
from mtplx_core.models.gguf import WeightFormat, convert_gguf, llama_weights, mlx_lm_format
from mtplx_core.models.gguf_tokenizer import tokenizer_files
from mtplx_core.models.loader import load_model
from tests.mtplx_core.models.wheels import gguf_arrays, metadata, write_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    convert_gguf(write_gguf(tmp_path / "tiny.gguf", seed=4), tmp_path / "model", weight_format="float32")
    return tmp_path / "model"


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_converted_model_computes_what_the_original_does(folder: Path) -> None:
    loaded = load_model(folder)
    tokens = mx.array([[5, 9, 200, 31]])

    difference = mx.abs(loaded.model(tokens) - random_llama(seed=4)(tokens)).max()

    assert difference.item() == 0
    assert loaded.dtype == mx.float32


def test_converted_model_knows_its_bounds(folder: Path) -> None:
    loaded = load_model(folder)

    assert loaded.vocab_size == CONFIG["vocab_size"]
    assert loaded.max_context == CONFIG["max_position_embeddings"]
    assert loaded.eos_token_ids == {EOS_TOKEN_ID}


@pytest.mark.parametrize(("weight_format", "dtype"), [("4bit", mx.float16), ("float32", mx.float32)])
def test_packed_weights_stay_on_their_grid(tmp_path: Path, weight_format: WeightFormat, dtype: mx.Dtype) -> None:
    """Packed ones are loaded as they are; unpacked ones are equal to them."""
    packed = packed_arrays()
    weights, config = mlx_lm_format(packed, metadata(), weight_format=weight_format)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    (tmp_path / "config.json").write_text(json.dumps(config))

    loaded = load_model(tmp_path)

    model: Any = loaded.model
    down, embedding = model.model.layers[1].mlp.down_proj, model.model.embed_tokens
    assert loaded.dtype == dtype
    assert mx.array_equal(plain(down, bits=4), unpacked(packed, "blk.1.ffn_down", bits=4)).item() is True
    assert mx.array_equal(plain(embedding, bits=8), unpacked(packed, "token_embd", bits=8)).item() is True


def packed_arrays() -> dict[str, mx.array]:
    """The random llama as quantised GGUF files load: 4 bits, the embedding 8, in groups of 32."""
    arrays = {}
    for name, array in gguf_arrays(seed=4).items():
        stem = name.removesuffix(".weight")
        if array.ndim == 1:
            arrays[name] = array
            continue
        bits = 8 if stem == "token_embd" else 4
        parts = mx.quantize(array.astype(mx.float16), group_size=32, bits=bits)
        arrays |= {f"{stem}.{part}": value for part, value in zip(("weight", "scales", "biases"), parts, strict=True)}
    return arrays


def unpacked(packed: Mapping[str, mx.array], stem: str, *, bits: int) -> mx.array:
    scales, biases = packed[f"{stem}.scales"], packed[f"{stem}.biases"]
    exact = (scales.astype(mx.float32), biases.astype(mx.float32))
    return mx.dequantize(packed[f"{stem}.weight"], *exact, group_size=32, bits=bits)


def plain(layer: Any, *, bits: int) -> mx.array:
    if "scales" not in layer:
        weight: mx.array = layer.weight
        return weight
    return unpacked({f"layer.{part}": layer[part] for part in ("weight", "scales", "biases")}, "layer", bits=bits)


def test_tokenizer_merges_after_splitting_single_digits_off(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("ab12a").tokens == ["ab", "1", "2", "a"]


def test_tokenizer_knows_special_tokens_inside_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|>b").ids

    assert ids == [4, EOS_TOKEN_ID, 5]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"


def test_tokenizer_config_carries_template_and_special_tokens(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())

    assert config["chat_template"] == CHAT_TEMPLATE
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == ("<|im_start|>", "<|im_end|>", "<|pad|>")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == EOS_TOKEN_ID


def test_other_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(ModelLoadError, match="llama-bpe"):
        tokenizer_files({**metadata(), "tokenizer.ggml.pre": "llama-bpe"})


def test_unknown_tensor_is_refused_by_name() -> None:
    with pytest.raises(ModelLoadError, match="blk.0.ssm_in.weight"):
        llama_weights({"blk.0.ssm_in.weight": mx.zeros((2, 2))}, CONFIG)


def test_other_architecture_is_refused(tmp_path: Path) -> None:
    gguf = tmp_path / "other.gguf"
    mx.save_gguf(str(gguf), {"a": mx.zeros((32,))}, {"general.architecture": "mamba"})

    with pytest.raises(ModelLoadError, match="mamba"):
        convert_gguf(gguf, tmp_path, weight_format="float32")
