"""Loading a folder, and what a model's identity hangs on. Engine: none; model: tiny random llama."""

from __future__ import annotations

import json
import os
from pathlib import Path

import mlx.core as mx
import pytest

from harness.models import CHAT_TEMPLATE, CONFIG, random_llama, write_tiny_llama
from mtplx_core.errors import ModelLoadError
from mtplx_core.models.loader import load_model, weight_bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "tiny")


def test_loaded_model_computes_what_was_saved(folder: Path) -> None:
    tokens = mx.array([[4, 5, 6]])

    loaded = load_model(folder)

    assert mx.array_equal(loaded.model(tokens), random_llama(seed=0)(tokens)).item() is True


def test_loaded_model_says_what_it_is(folder: Path) -> None:
    loaded = load_model(str(folder))

    name, _, digest = loaded.identity.partition("@")
    assert (loaded.name, name) == ("tiny", "tiny")
    assert len(digest) == 12
    assert (loaded.vocab_size, loaded.max_context, loaded.dtype) == (CONFIG["vocab_size"], 1024, mx.float32)
    assert weight_bytes(loaded) > 100_000


def test_identity_is_the_same_for_the_same_model_elsewhere(folder: Path, tmp_path: Path) -> None:
    other = write_tiny_llama(tmp_path / "elsewhere" / "tiny")

    assert load_model(other).identity == load_model(folder).identity


def change_weights(folder: Path) -> None:
    write_tiny_llama(folder, seed=1)


def change_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 5000.0}))


def change_tokenizer(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "other"}))


@pytest.mark.parametrize("change", [change_weights, change_config, change_tokenizer])
def test_identity_changes_with_each_part_of_the_model(folder: Path, change: object, tmp_path: Path) -> None:
    before = load_model(folder, cache_dir=tmp_path / "cache").identity

    assert callable(change)
    change(folder)

    assert load_model(folder, cache_dir=tmp_path / "cache").identity != before


def test_weights_are_hashed_once(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="mtplx_core.models.fingerprint")

    first, second = (load_model(folder, cache_dir=tmp_path / "cache").identity for _ in range(2))

    assert first == second
    assert len(caplog.records) == 1


def test_touched_weights_are_hashed_again(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="mtplx_core.models.fingerprint")
    before = load_model(folder, cache_dir=tmp_path / "cache").identity

    os.utime(folder / "model.safetensors", (1, 1))

    assert load_model(folder, cache_dir=tmp_path / "cache").identity == before
    assert len(caplog.records) == 2


def test_damaged_hash_cache_is_rebuilt(folder: Path, tmp_path: Path) -> None:
    before = load_model(folder, cache_dir=tmp_path).identity
    (tmp_path / "weight_hashes.json").write_text("{half")

    assert load_model(folder, cache_dir=tmp_path).identity == before
    assert json.loads((tmp_path / "weight_hashes.json").read_text())


def test_tokenizer_files_are_those_of_the_list_alone(folder: Path) -> None:
    (folder / "secrets.json").write_text("{}")

    files = load_model(folder).tokenizer_files

    assert sorted(files) == ["tokenizer.json", "tokenizer_config.json"]
    assert json.loads(files["tokenizer_config.json"])["chat_template"] == CHAT_TEMPLATE


def test_several_end_of_sequence_tokens_are_all_taken(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))

    assert load_model(folder).eos_token_ids == {2, 3}


@pytest.mark.parametrize("named", [3, [3], [3, 5]], ids=["one", "a list", "several"])
def test_end_tokens_of_the_generation_config_come_beside_those_of_the_configuration(
    folder: Path, named: int | list[int]
) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))

    assert load_model(folder).eos_token_ids == {2, *(named if isinstance(named, list) else [named])}


def test_end_tokens_are_part_of_the_identity(folder: Path) -> None:
    before = load_model(folder).identity
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))

    assert load_model(folder).identity != before


@pytest.mark.parametrize("source", ["/nowhere/at/all", "./missing", "missing"])
def test_missing_folder_is_said_to_be_missing(source: str) -> None:
    with pytest.raises(ModelLoadError, match="no model folder"):
        load_model(source)


def test_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()

    with pytest.raises(ModelLoadError, match="safetensors"):
        load_model(folder)


def test_unknown_architecture_is_refused_by_name(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": "unheard_of"}))

    with pytest.raises(ModelLoadError, match="unheard_of"):
        load_model(folder)


def test_config_without_a_context_length_is_refused(folder: Path) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "max_position_embeddings"}
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(ModelLoadError, match="context length"):
        load_model(folder)
