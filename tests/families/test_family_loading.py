"""How the loader takes families that publish unusual things, and how it refuses those it cannot load."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from harness.families.checkpoints import NEEDS_GPU, NOT_HERE, write_checkpoint
from harness.families.sizes import CONTEXT
from harness.models import CONFIG, write_tiny_llama
from mtplx_core.errors import ModelLoadError
from mtplx_core.models.loader import UNBOUNDED_CONTEXT, load_model


@pytest.mark.parametrize("family", ["dbrx", "gpt2", "kimi_linear", "lille-130m", "openelm"])
def test_context_length_is_read_under_the_name_the_family_gives_it(family: str, tmp_path: Path) -> None:
    assert load_model(write_checkpoint(tmp_path / family, family)).max_context == CONTEXT


@pytest.mark.parametrize("family", ["mamba", "recurrent_gemma"])
def test_model_of_which_nothing_grows_needs_no_context_length(family: str, tmp_path: Path) -> None:
    assert load_model(write_checkpoint(tmp_path / family, family)).max_context == UNBOUNDED_CONTEXT


def test_module_that_ends_the_process_is_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    """mlx-lm's module for OLMo does that where a package is missing."""
    folder = write_tiny_llama(tmp_path / "olmo")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": "olmo"}))

    with pytest.raises(ModelLoadError, match="needs a package"):
        load_model(folder)


@pytest.mark.skipif(mx.metal.is_available(), reason="a GPU runs its kernels")
@pytest.mark.parametrize("family", sorted(NEEDS_GPU))
def test_model_whose_kernels_need_a_gpu_is_refused_without_one(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / family, family)

    with pytest.raises(ModelLoadError, match="Metal"):
        load_model(folder)


def test_families_that_cannot_be_built_here_are_those_refused_above() -> None:
    assert set(NOT_HERE) == {*NEEDS_GPU, "olmo"}
