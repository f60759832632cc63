"""What `mtplx inspect` finds out without running anything. Tiny random checkpoints in folders and as hub headers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from click.testing import CliRunner

from console.commands.inspect import inspect
from harness.models import CONFIG, write_tiny_llama, write_tiny_mamba
from mtplx_core.engine import Geometry
from mtplx_core.errors import ModelLoadError
from mtplx_core.inspection import Inspection, Outline, inspect_model
from mtplx_core.models.trunk import Trunk
from mtplx_core.mtp.device_batch import DeviceBatch
from tests.mtplx_core.heads.layouts import (
    DENSE,
    EXPERTS_35,
    MIMO,
    NEXT,
    Tiny,
    fused,
    less_one,
    quantised,
    tiny,
    unconverted,
    under,
    write,
)

NAMES = {mx.float32: "F32", mx.bfloat16: "BF16", mx.uint32: "U32"}


class HeadersOf:
    """A hub that holds one folder and gives away no weights."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def config(self, repository: str) -> dict[str, Any]:
        assert self._folder is not None
        config: dict[str, Any] = json.loads((self._folder / "config.json").read_text())
        return config

    def outlines(self, repository: str) -> dict[str, dict[str, Outline]]:
        if self._folder is None:
            raise ModelLoadError(f"{repository} cannot be read")
        files: dict[str, Any] = {file.name: mx.load(str(file)) for file in self._folder.glob("*.safetensors")}
        return {
            file: {name: Outline(NAMES[tensor.dtype], tensor.shape) for name, tensor in tensors.items()}
            for file, tensors in files.items()
        }


def look(folder: Path | str, *, hub: HeadersOf | None = None, depth: int = 1, context_tokens: int = 512) -> Inspection:
    return inspect_model(str(folder), hub=hub or HeadersOf(), context_tokens=context_tokens, depth=depth)


def published(folder: Path, config: dict[str, Any]) -> tuple[Tiny, Path]:
    made = tiny(config)
    head = under("mtp.", fused(less_one(made.head_weights)))
    return made, write(folder, made, unconverted(made), {"model.safetensors": head})


def test_published_checkpoint_runs_in_every_mode_with_its_head(tmp_path: Path) -> None:
    made, folder = published(tmp_path, EXPERTS_35)

    found = look(folder)

    assert (found.family, found.has_experts, found.quantisation) == ("qwen3_5_moe", True, "none, float32")
    assert (found.head.is_usable, found.head.norms) == (True, "7 of 7 less one")
    assert [mode.reason for mode in found.modes] == ["", "", ""]
    assert found.weight_bytes == sum(array.nbytes for array in made.trunk_weights.values())


def test_row_memory_is_that_of_the_lane(tmp_path: Path) -> None:
    made, folder = published(tmp_path, DENSE)
    batch = DeviceBatch(Trunk(made.model), Geometry(1, 512, 2), made.head)

    found = look(folder, depth=2)

    assert found.modes[-1].row_bytes == batch.row_bytes(512)


def test_hub_id_is_told_from_headers_alone_but_for_the_norms(tmp_path: Path) -> None:
    _, folder = published(tmp_path, DENSE)
    local = look(folder)

    found = look("someone/model", hub=HeadersOf(folder))

    assert found.head.norms == "known once the weights are here"
    assert (found.modes, found.weight_bytes) == (local.modes, local.weight_bytes)


def test_quantisation_is_told(tmp_path: Path) -> None:
    made = tiny(DENSE)
    head = quantised(made.head)
    settings = {"group_size": 32, "bits": 4}
    folder = write(tmp_path, made, quantised(made.model), {"mtp.safetensors": head}, quantization=settings)

    found = look(folder)

    assert found.quantisation == found.head.quantisation == "affine, 4 bits, groups of 32"
    assert found.head.norms == "0 of 7 less one"
    assert found.modes[-1].reason == ""


def test_head_under_bare_names_beside_the_trunk_is_told_and_not_counted_as_the_trunks(tmp_path: Path) -> None:
    made = tiny(DENSE)
    plain = look(write(tmp_path / "plain", made, made.trunk_weights, {}))

    found = look(
        write(tmp_path / "m", made, made.trunk_weights, {"model-mtp.safetensors": less_one(made.head_weights)})
    )

    assert (found.head.is_usable, found.head.tensors) == (True, len(made.head_weights))
    assert found.weight_bytes == plain.weight_bytes


def test_mimo_is_told_with_its_head(tmp_path: Path) -> None:
    made = tiny(MIMO)
    head = {name.removeprefix("layer."): array for name, array in made.head_weights.items()}
    weights = made.trunk_weights | under("model.mtp_layers.0.", head)

    found = look(write(tmp_path, made, weights, {}))

    assert (found.head.is_usable, found.head.norms) == (True, "as they are")


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"mtp_use_dedicated_embeddings": True}, "embeddings of its own"), ({"intermediate_size": 32}, "the model wants")],
    ids=["dedicated embeddings", "other shapes"],
)
def test_head_that_is_not_used_is_told_with_the_reason(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    made = tiny(DENSE)
    head = under("mtp.", less_one(made.head_weights))

    found = look(write(tmp_path, made, made.trunk_weights, {"mtp.safetensors": head}, **change))

    assert not found.head.is_usable
    assert reason in found.head.reason


def test_checkpoint_without_a_head_is_told(tmp_path: Path) -> None:
    made = tiny(NEXT)

    found = look(write(tmp_path, made, made.trunk_weights, {}))

    assert found.head.reason == "no weights of one in the checkpoint"
    assert found.modes[-1].reason == ""


def test_model_of_another_family_is_told(tmp_path: Path) -> None:
    found = look(write_tiny_llama(tmp_path))

    assert found.head.reason == "this family brings none"
    assert [mode.reason for mode in found.modes] == ["", "", ""]


def test_reason_of_each_mode_that_cannot_run_is_told(tmp_path: Path) -> None:
    serial, ar_batch, mtp_batch = look(write_tiny_mamba(tmp_path)).modes

    assert (serial.reason, ar_batch.reason) == ("", "")
    assert "ArraysCache" in mtp_batch.reason


def test_windows_run_in_every_mode_in_the_memory_of_their_size(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    whole = [mode.row_bytes for mode in look(folder, context_tokens=4096).modes]
    windows = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **windows}))

    found = look(folder, context_tokens=4096).modes

    assert [mode.reason for mode in found] == ["", "", ""]
    assert all(mode.row_bytes < 0.7 * before for mode, before in zip(found, whole, strict=True))


def test_unknown_model_runs_nowhere(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": "nothing_known"}))

    assert all("nothing_known not supported" in mode.reason for mode in look(folder).modes)


def test_missing_model_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="no model folder"):
        look("./nowhere")


def test_command_prints_a_page_and_json(tmp_path: Path) -> None:
    _, folder = published(tmp_path, EXPERTS_35)

    page = CliRunner().invoke(inspect, [str(folder)], catch_exceptions=False).output
    told = json.loads(CliRunner().invoke(inspect, [str(folder), "--json"], catch_exceptions=False).output)

    assert "qwen3_5_moe, mixture of experts" in page
    assert "mtp_batch" in page
    assert "rows fit" in page
    assert told["head"]["is_usable"] is True
    assert told["modes"][2]["mode"] == "mtp_batch"
