"""Heads read out of checkpoints in every published layout, against a calculation of their own. Tiny random models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mtplx_core.caches.ragged import RaggedCache, layer_shapes, plain_caches
from mtplx_core.engine import Geometry, Row, SamplingParams
from mtplx_core.errors import ModelLoadError
from mtplx_core.heads.base import Head
from mtplx_core.heads.mimo import load_mimo_head
from mtplx_core.heads.native import load_native_head, stored_head
from mtplx_core.heads.qwen import StoredQwenHead
from mtplx_core.heads.tensors import load_files
from mtplx_core.models.loader import LoadedModel, load_model
from mtplx_core.models.trunk import Trunk
from mtplx_core.mtp.depth import FixedDepth
from mtplx_core.mtp.engine import MtpBatchEngine, MtpOptions
from mtplx_core.sampling.audit import audit
from tests.mtplx_core.driving import run
from tests.mtplx_core.heads.layouts import (
    DENSE,
    EXPERTS_35,
    MIMO,
    NEXT,
    SIZE,
    Tiny,
    Weights,
    fused,
    less_one,
    loaded_of,
    one_by_one,
    quantised,
    tiny,
    unconverted,
    under,
    write,
)
from tests.mtplx_core.heads.reference_heads import Floats, Shape, as_floats, mimo_head, qwen_head

TOKENS = [5, 9, 70, 9, 12, 33]
SHAPE = Shape(query_heads=2, key_heads=1, head_size=32, rotated=8, theta=100000.0, eps=1e-6, experts_per_token=2)
SHAPES = {
    "qwen3_5": SHAPE,
    "qwen3_5_moe": SHAPE,
    "qwen3_next": SHAPE._replace(theta=10000.0),
    "mimo": SHAPE._replace(rotated=32, theta=10000.0),
}


def as_published(folder: Path, made: Tiny) -> Path:
    """Trunk and head unconverted, experts as the family has them, in one file."""
    spread = one_by_one if made.config["model_type"] == "qwen3_next" else fused
    return write(
        folder, made, unconverted(made), {"model.safetensors": under("mtp.", spread(less_one(made.head_weights)))}
    )


def under_the_language_model(folder: Path, made: Tiny) -> Path:
    head = under("model.language_model.mtp.", less_one(made.head_weights))
    return write(folder, made, unconverted(made), {"model.safetensors": head})


def converted(folder: Path, made: Tiny) -> Path:
    """As mlx-lm writes a trunk, with a head that a converter shifted and kept beside it."""
    prefix = "mtp." if made.config["model_type"] == "qwen3_next" else "language_model.mtp."
    return write(folder, made, made.trunk_weights, {"model.safetensors": under(prefix, made.head_weights)})


def in_a_sidecar(folder: Path, made: Tiny) -> Path:
    """A converted trunk, and the published head in a file of its own."""
    return write(folder, made, made.trunk_weights, {"mtp.safetensors": under("mtp.", less_one(made.head_weights))})


def in_a_folder_with_bare_names(folder: Path, made: Tiny) -> Path:
    return write(folder, made, made.trunk_weights, {"mtp/weights.safetensors": less_one(made.head_weights)})


def beside_the_trunk_with_bare_names(folder: Path, made: Tiny) -> Path:
    """Where mlx-lm takes every `model*` file for the trunk's."""
    return write(folder, made, made.trunk_weights, {"model-mtp.safetensors": less_one(made.head_weights)})


def beside_the_trunk(folder: Path, made: Tiny) -> Path:
    head = under("mtp.", less_one(made.head_weights))
    return write(folder, made, made.trunk_weights, {"model-mtp-00001-of-00001.safetensors": head})


def with_experts_one_by_one(folder: Path, made: Tiny) -> Path:
    """As the eight-bit releases have them, but for the bits."""
    head = under("mtp.", one_by_one(less_one(made.head_weights)))
    return write(folder, made, made.trunk_weights, {"mtp.safetensors": head})


LAYOUTS: list[tuple[dict[str, Any], Callable[[Path, Tiny], Path]]] = [
    *((config, as_published) for config in (DENSE, EXPERTS_35, NEXT)),
    *((config, converted) for config in (DENSE, EXPERTS_35, NEXT)),
    (DENSE, under_the_language_model),
    (DENSE, in_a_sidecar),
    (NEXT, in_a_sidecar),
    (DENSE, in_a_folder_with_bare_names),
    (DENSE, beside_the_trunk_with_bare_names),
    (EXPERTS_35, beside_the_trunk_with_bare_names),
    (NEXT, beside_the_trunk_with_bare_names),
    (DENSE, beside_the_trunk),
    (EXPERTS_35, with_experts_one_by_one),
]


def read(folder: Path) -> tuple[LoadedModel, Trunk, StoredQwenHead]:
    """Through the real loader, with the norms as they look."""
    loaded = load_model(folder)
    trunk = Trunk(loaded.model)
    stored = StoredQwenHead(trunk, stored_head(load_files(folder), loaded.config), loaded.config)
    stored.read_as(stored.conventions[0])
    return loaded, trunk, stored


def random_hidden(count: int = len(TOKENS)) -> mx.array:
    return mx.random.normal((1, count, SIZE), key=mx.random.key(9))


def fed_at_once(head: Head, hidden: mx.array) -> Floats:
    return np.array(head(hidden, mx.array([TOKENS]))[0], np.float64)


def embedding_of(made: Tiny) -> Floats:
    model = getattr(made.model, "language_model", made.model)
    return np.array(model.model.embed_tokens.weight, np.float64)


def expected(made: Tiny, hidden: mx.array, tokens: list[int]) -> Floats:
    """By the calculation, from the true weights."""
    weights, shape = as_floats(made.head_weights), SHAPES[made.config["model_type"]]
    states = np.array(hidden[0], np.float64)
    if made.config["model_type"] == "mimo":
        flat = {name.removeprefix("layer."): array for name, array in weights.items()}
        return mimo_head(flat, embedding_of(made), states, tokens, shape)
    return qwen_head(weights, embedding_of(made), states, tokens, shape)


@pytest.mark.parametrize(
    ("config", "layout"), LAYOUTS, ids=[f"{config['model_type']}-{layout.__name__}" for config, layout in LAYOUTS]
)
def test_head_says_what_its_weights_say_in_every_layout(
    config: dict[str, Any], layout: Callable[[Path, Tiny], Path], tmp_path: Path
) -> None:
    made, hidden = tiny(config), random_hidden()

    _, _, stored = read(layout(tmp_path, made))

    np.testing.assert_allclose(fed_at_once(stored.head, hidden), expected(made, hidden, TOKENS), rtol=0, atol=2e-4)


@pytest.mark.parametrize("layout", [converted, beside_the_trunk_with_bare_names])
def test_trunk_loads_the_same_with_and_without_a_head_beside_it(
    layout: Callable[[Path, Tiny], Path], tmp_path: Path
) -> None:
    made = tiny(NEXT)
    plain = load_model(write(tmp_path / "plain", made, made.trunk_weights, {}))
    beside = load_model(layout(tmp_path / "beside", made))
    tokens = mx.array([TOKENS])

    model, other = (_model(loaded) for loaded in (plain, beside))

    assert mx.array_equal(model(tokens), other(tokens))


@pytest.mark.parametrize("config", [DENSE, EXPERTS_35, MIMO], ids=lambda config: config["model_type"])
def test_head_fed_pair_by_pair_and_then_with_its_own_state_is_the_calculation_over_all_of_them(
    config: dict[str, Any],
) -> None:
    """At depth 2 the pair is the head's own state and the draft, one position further."""
    made, hidden = tiny(config), random_hidden()
    cache = plain_caches(1)
    steps = [made.head(hidden[:, at : at + 1], mx.array([[TOKENS[at]]]), cache) for at in range(len(TOKENS))]

    drafted = made.head(steps[-1], mx.array([[44]]), cache)

    states = mx.concatenate([hidden, steps[-1]], axis=1)
    wanted = expected(made, states, [*TOKENS, 44])
    found = np.array(mx.concatenate([*steps, drafted], axis=1)[0], np.float64)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-4)


def test_rows_at_different_positions_get_their_own_first_pair() -> None:
    """MiMo leaves the embedding out at position 0 of each row, wherever the others stand."""
    made, hidden = tiny(MIMO), random_hidden(2)
    plain = plain_caches(1)
    made.head(hidden[:, :1], mx.array([TOKENS[:1]]), plain)
    ragged = RaggedCache(layer_shapes(plain))
    ragged.reserve(2, 8)
    ragged.insert(0, plain)

    ragged.begin(mx.array([1, 0], mx.int32), 1, longest=2)
    both = mx.concatenate([hidden[:, 1:], hidden[:, :1]])
    found = made.head(both, mx.array([[TOKENS[1]], [TOKENS[0]]]), ragged.layers)

    wanted = expected(made, hidden, TOKENS[:2])
    np.testing.assert_allclose(np.array(found[0, 0]), wanted[1], rtol=0, atol=2e-4)
    np.testing.assert_allclose(np.array(found[1, 0]), wanted[0], rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("file", "prefix"),
    [("model.safetensors", "model.mtp_layers.0."), ("model-mtp.safetensors", "0."), ("model-mtp.safetensors", "")],
    ids=str,
)
def test_mimo_head_is_read_from_its_layout(file: str, prefix: str, tmp_path: Path) -> None:
    made, hidden = tiny(MIMO), random_hidden()
    head = {name.removeprefix("layer."): array for name, array in made.head_weights.items()}
    folder = write(tmp_path, made, made.trunk_weights, {file: under(prefix, head)})

    loaded = load_model(folder)
    found = load_mimo_head(Trunk(loaded.model), stored_head(load_files(folder), loaded.config))

    np.testing.assert_allclose(fed_at_once(found, hidden), expected(made, hidden, TOKENS), rtol=0, atol=2e-4)


@pytest.mark.parametrize("config", [DENSE, EXPERTS_35, NEXT], ids=lambda config: config["model_type"])
@pytest.mark.parametrize("spread", [dict, one_by_one, fused], ids=["stacked", "one by one", "fused"])
def test_quantised_head_is_run_as_it_is_stored(
    config: dict[str, Any], spread: Callable[[Weights], Weights], tmp_path: Path
) -> None:
    made, hidden = tiny(config), random_hidden()
    weights = quantised(made.head)
    wanted = fed_at_once(made.head, hidden)

    folder = write(tmp_path, made, made.trunk_weights, {"mtp.safetensors": under("mtp.", spread(weights))})
    _, _, stored = read(folder)

    assert stored.head.fc.bits == 4
    np.testing.assert_allclose(fed_at_once(stored.head, hidden), wanted, rtol=0, atol=1e-5)


def test_quantised_trunk_and_head_load_together(tmp_path: Path) -> None:
    made, hidden = tiny(DENSE), random_hidden()
    head, trunk = quantised(made.head), quantised(made.model)
    wanted = fed_at_once(made.head, hidden)

    folder = write(
        tmp_path,
        made,
        trunk,
        {"model.safetensors": under("language_model.mtp.", head)},
        quantization={"group_size": 32, "bits": 4},
    )
    _, _, stored = read(folder)

    np.testing.assert_allclose(fed_at_once(stored.head, hidden), wanted, rtol=0, atol=1e-5)


def test_scales_take_the_trunks_type(tmp_path: Path) -> None:
    made = tiny(DENSE)
    head = quantised(made.head)
    made.model.set_dtype(mx.bfloat16)
    folder = write(tmp_path, made, made.trunk_weights, {"mtp.safetensors": under("mtp.", head)})

    _, _, stored = read(folder)

    assert stored.head.fc.scales.dtype == mx.bfloat16
    assert stored.head(random_hidden().astype(mx.bfloat16), mx.array([TOKENS])).dtype == mx.bfloat16


def test_head_in_eight_bit_floats_is_brought_back_square_by_square(tmp_path: Path) -> None:
    made, hidden = tiny(DENSE), random_hidden()
    weights = less_one(made.head_weights)
    scale = mx.array([[0.5]])
    for name in ("fc.weight", "layers.0.mlp.up_proj.weight"):
        eight = mx.to_fp8(weights[name] / 0.5)
        weights[name], weights[f"{name}_scale_inv"] = eight, scale
        layer: Any = made.head.fc if name == "fc.weight" else made.head.layers[0].mlp.up_proj
        layer.weight = (mx.from_fp8(eight, dtype=mx.float32) * 0.5).astype(mx.bfloat16).astype(mx.float32)

    _, _, stored = read(write(tmp_path, made, made.trunk_weights, {"mtp.safetensors": under("mtp.", weights)}))

    np.testing.assert_allclose(fed_at_once(stored.head, hidden), expected(made, hidden, TOKENS), rtol=0, atol=2e-4)


def test_file_of_the_trunk_may_be_called_like_a_heads(tmp_path: Path) -> None:
    made = tiny(DENSE)
    folder = write(tmp_path, made, made.trunk_weights, {})
    (folder / "model.safetensors").rename(folder / "model-mtp.safetensors")

    loaded = load_model(folder)

    assert mx.array_equal(_model(loaded)(mx.array([TOKENS])), made.model(mx.array([TOKENS])))
    assert stored_head(load_files(folder), loaded.config) == {}


def test_name_that_trunk_and_head_both_use_is_refused(tmp_path: Path) -> None:
    made = tiny(DENSE)
    trunk = {**made.trunk_weights, "fc.weight": mx.zeros((1,))}
    folder = write(tmp_path, made, trunk, {"model-mtp.safetensors": made.head_weights})

    with pytest.raises(ModelLoadError, match=r"fc\.weight is the name of a weight of the trunk and of the head"):
        load_model(folder)


def test_of_two_copies_the_sidecars_is_taken_whole(tmp_path: Path) -> None:
    made, other, hidden = tiny(DENSE), tiny(DENSE), random_hidden()
    stale = under("mtp.", quantised(other.head))
    folder = write(
        tmp_path,
        made,
        made.trunk_weights,
        {"model.safetensors": stale, "mtp.safetensors": under("mtp.", less_one(made.head_weights))},
    )

    _, _, stored = read(folder)

    np.testing.assert_allclose(fed_at_once(stored.head, hidden), expected(made, hidden, TOKENS), rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [({"mtp_use_dedicated_embeddings": True}, "embeddings of its own"), ({"mtp_num_hidden_layers": 2}, "2 layers")],
    ids=["dedicated embeddings", "two layers"],
)
def test_head_of_an_unknown_kind_is_refused(setting: dict[str, Any], reason: str, tmp_path: Path) -> None:
    made = tiny({**DENSE, **setting})
    loaded = load_model(as_published(tmp_path, made))

    with pytest.raises(ModelLoadError, match=reason):
        load_native_head(loaded, Trunk(loaded.model))


def _drop(weights: Weights, name: str) -> Weights:
    return {key: array for key, array in weights.items() if key != name}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda head: _drop(head, "fc.weight"), "lacks fc.weight"),
        (lambda head: _drop(head, "norm.weight"), "lacks norm.weight"),
        (lambda head: {**head, "embed_tokens.weight": head["fc.weight"]}, "nobody uses: embed_tokens"),
        (lambda head: {**head, "fc.weight": head["fc.weight"][:, :SIZE]}, "fc.weight is"),
        (lambda head: _drop(one_by_one(head), "layers.0.mlp.experts.1.up_proj.weight"), "experts are missing"),
    ],
    ids=["no projection", "no norm", "an embedding", "another width", "an expert missing"],
)
def test_incomplete_head_is_refused_with_what_is_wrong(
    change: Callable[[Weights], Weights], reason: str, tmp_path: Path
) -> None:
    made = tiny(EXPERTS_35)
    folder = write(tmp_path, made, made.trunk_weights, {"mtp.safetensors": change(less_one(made.head_weights))})

    with pytest.raises(ModelLoadError, match=reason):
        read(folder)


def test_head_that_drafts_nothing_right_is_refused(tmp_path: Path) -> None:
    loaded = load_model(as_published(tmp_path, tiny(DENSE)))

    with pytest.raises(ModelLoadError, match="at least 5% is needed"):
        load_native_head(loaded, Trunk(loaded.model))


@pytest.mark.parametrize("config", [EXPERTS_35, NEXT, MIMO], ids=lambda config: config["model_type"])
def test_lane_decodes_with_a_familys_head(config: dict[str, Any]) -> None:
    made = tiny(config)
    loaded = loaded_of(made)
    geometry = Geometry(decode_batch_max=2, max_context_tokens=64, depth=2)
    engine = MtpBatchEngine(loaded, geometry, head=made.head, options=MtpOptions(policy=FixedDepth(2)))
    rows = [
        Row("one", (5, 6, 7), 10, ignore_eos=True),
        Row("two", (9,), 13, SamplingParams(1.0, seed=3), ignore_eos=True),
    ]

    heard = run(engine, rows)

    for row in rows:
        assert audit(loaded.model, row.prompt, heard.tokens[row.row_id], row.sampling).passed
    assert engine.snapshot()["drafters"]["head"]["tried"] > 0


def test_model_without_a_head_has_none(tmp_path: Path) -> None:
    made = tiny(DENSE)
    loaded = load_model(write(tmp_path, made, made.trunk_weights, {}))

    assert load_native_head(loaded, Trunk(loaded.model)) is None


def _model(loaded: LoadedModel) -> Any:
    return loaded.model
