"""The attached head: its format on disk, whom it belongs to, and the floor it must reach. Runs on a tiny llama."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn
import pytest

from harness.models import VOCAB_SIZE, tiny_llama
from mtplx_core.caches.ragged import plain_caches
from mtplx_core.errors import ModelLoadError
from mtplx_core.heads.attached import DESCRIPTION_FILE, AttachedHead, load_attached_head, save_attached_head
from mtplx_core.heads.usefulness import measure_agreement
from mtplx_core.models.trunk import Trunk
from mtplx_core.mtp.assemble import load_head

TOKENS = mx.array([[5, 9, 70, 9, 12, 33]])


@pytest.fixture
def trunk() -> Trunk:
    return Trunk(tiny_llama().model)


@pytest.fixture
def head(trunk: Trunk) -> AttachedHead:
    made = AttachedHead(trunk, [9, 4, 200, 9, 31], max_depth=2, name="trained")
    made.layer.mlp.down_proj.weight = mx.random.normal(made.layer.mlp.down_proj.weight.shape, key=mx.random.key(1))
    return made


def predict(head: AttachedHead, trunk: Trunk) -> mx.array:
    return head.logits(head(trunk.hidden(TOKENS)[:, :-1], TOKENS[:, 1:]))


def test_head_comes_back_from_disk_as_it_was(head: AttachedHead, trunk: Trunk, tmp_path: Path) -> None:
    save_attached_head(head, tmp_path, trained_on="tiny@1")

    loaded = load_attached_head(tmp_path, trunk)

    assert (loaded.name, loaded.max_depth) == ("trained", 2)
    assert loaded.draft_ids.tolist() == [4, 9, 31, 200]
    assert mx.array_equal(predict(loaded, trunk), predict(head, trunk))


def test_fresh_head_hands_on_the_trunks_hidden_state(trunk: Trunk) -> None:
    fresh = AttachedHead(trunk, list(range(VOCAB_SIZE)))
    hidden = trunk.hidden(TOKENS)

    assert mx.allclose(fresh(hidden[:, :-1], TOKENS[:, 1:]), hidden[:, :-1], atol=1e-3)


def test_head_predicts_the_same_pair_by_pair_as_at_once(head: AttachedHead, trunk: Trunk) -> None:
    hidden = trunk.hidden(TOKENS)
    cache = plain_caches(head.cached_layers)

    steps = [head(hidden[:, place : place + 1], TOKENS[:, place + 1 : place + 2], cache) for place in range(5)]

    assert mx.allclose(mx.concatenate(steps, axis=1), head(hidden[:, :-1], TOKENS[:, 1:]), atol=1e-4)


def test_head_is_refused_by_another_model(head: AttachedHead, tmp_path: Path) -> None:
    save_attached_head(head, tmp_path, trained_on="tiny@1")
    other = tiny_llama(seed=1).model
    other.model.norm.weight = other.model.norm.weight * 1.1

    with pytest.raises(ModelLoadError, match="trained for tiny@1"):
        load_attached_head(tmp_path, Trunk(other))


@pytest.mark.parametrize("change", [0.02, 0.3], ids=["lightly", "much"])
def test_head_is_refused_by_a_finetune_whose_norms_are_untouched(
    head: AttachedHead, tmp_path: Path, change: float
) -> None:
    save_attached_head(head, tmp_path, trained_on="tiny@1")
    tuned = tiny_llama().model
    weight = tuned.layers[0].self_attn.v_proj.weight
    tuned.layers[0].self_attn.v_proj.weight = weight * (1 + change * mx.random.normal(weight.shape))

    with pytest.raises(ModelLoadError, match="v_proj holds other weights"):
        load_attached_head(tmp_path, Trunk(tuned))


def test_head_without_a_sample_of_its_trunk_is_refused(head: AttachedHead, trunk: Trunk, tmp_path: Path) -> None:
    save_attached_head(head, tmp_path, trained_on="tiny@1")
    path = str(tmp_path / "head.safetensors")
    weights: Any = mx.load(path)
    mx.save_safetensors(path, {name: value for name, value in weights.items() if not name.startswith("trunk.")})

    with pytest.raises(ModelLoadError, match="a finetune needs a head of its own"):
        load_attached_head(tmp_path, trunk)


@pytest.mark.parametrize("bits", [3, 8])
def test_head_is_refused_by_another_model_of_few_bits(head: AttachedHead, tmp_path: Path, bits: int) -> None:
    save_attached_head(head, tmp_path, trained_on="tiny@1")
    other: Any = tiny_llama(seed=1).model
    mlx.nn.quantize(other, group_size=32, bits=bits)  # type: ignore[attr-defined]  # mlx.nn carries no types

    with pytest.raises(ModelLoadError, match="other weights"):
        load_attached_head(tmp_path, Trunk(other))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_head_follows_its_trunk_to_half_types(head: AttachedHead, tmp_path: Path, dtype: mx.Dtype) -> None:
    save_attached_head(head, tmp_path, trained_on="tiny@1")
    model: Any = tiny_llama().model
    model.set_dtype(dtype)

    assert load_attached_head(tmp_path, Trunk(model)).fc.weight.dtype == dtype


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_head_follows_its_trunk_to_few_bits(head: AttachedHead, tmp_path: Path, bits: int) -> None:
    save_attached_head(head, tmp_path, trained_on="tiny@1")
    model: Any = tiny_llama().model
    mlx.nn.quantize(model, group_size=32, bits=bits)  # type: ignore[attr-defined]  # mlx.nn carries no types

    assert load_attached_head(tmp_path, Trunk(model)).max_depth == 2


def test_head_follows_its_trunk_to_other_dtypes_and_to_four_bits(head: AttachedHead, tmp_path: Path) -> None:
    save_attached_head(head, tmp_path, trained_on="tiny@1")
    model: Any = tiny_llama().model
    model.set_dtype(mx.bfloat16)
    mlx.nn.quantize(model, group_size=32, bits=4)  # type: ignore[attr-defined]  # mlx.nn carries no types
    trunk = Trunk(model)

    loaded = load_attached_head(tmp_path, trunk)

    assert loaded.fc.weight.dtype == mx.bfloat16
    assert predict(loaded, trunk).shape == (1, 5, 4)


@pytest.mark.parametrize("missing", ["source", "max_depth", "format"])
def test_incomplete_description_is_refused(head: AttachedHead, trunk: Trunk, tmp_path: Path, missing: str) -> None:
    save_attached_head(head, tmp_path, trained_on="tiny@1")
    path = tmp_path / DESCRIPTION_FILE
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != missing}))

    with pytest.raises(ModelLoadError, match=missing):
        load_attached_head(tmp_path, trunk)


def test_missing_head_is_refused(trunk: Trunk, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no readable"):
        load_attached_head(tmp_path / "nowhere", trunk)


def test_head_below_the_floor_is_refused_with_its_figure(head: AttachedHead, tmp_path: Path) -> None:
    save_attached_head(head, tmp_path, trained_on="tiny@1")

    with pytest.raises(ModelLoadError, match=r"drafts \d+\.\d% of a built-in text right"):
        load_head(tmp_path, tiny_llama())


def test_agreement_of_a_head_that_is_always_right_is_one(trunk: Trunk) -> None:
    tokens = mx.array([[5, 9, 70, 9, 12, 33], [7, 7, 8, 1, 2, 3]], mx.int32)
    said = mx.argmax(trunk.logits(trunk.hidden(tokens)), axis=-1)[:, 1:]

    class Knowing(AttachedHead):
        def logits(self, hidden: mx.array) -> mx.array:
            return (said[..., None] == mx.arange(VOCAB_SIZE)).astype(mx.float32)

    knowing = Knowing(trunk, list(range(VOCAB_SIZE)))

    assert measure_agreement(trunk, knowing, tokens) == 1.0
