"""Finds a head's own tensors in a checkpoint, under whichever prefix and in whichever file they were published.

Values stay on disk until they are used. What the tensors mean is not known here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mtplx_core.errors import ModelLoadError

logger = logging.getLogger(__name__)

Tensors = dict[str, mx.array]

_FP8_BLOCK = 128


def load_files(folder: Path) -> dict[str, Tensors]:
    """Every file of weights in a checkpoint, by its path in it.

    Raises:
        ModelLoadError: a file cannot be read.
    """
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("mtp/*.safetensors")])
    return {str(file.relative_to(folder)): _load(file) for file in files}


def find_tensors(files: Mapping[str, Tensors], prefixes: Sequence[str]) -> Tensors:
    """A head's tensors by their name behind the prefix; empty where the checkpoint has none.

    One place is taken as a whole, so that weights of one conversion never meet scales of another: a file or folder of
    the head's own (`mtp.safetensors`, `mtp/`), where names may also be bare, goes before the model's files.

    Args:
        files: of the checkpoint.
        prefixes: what the names may begin with.
    """
    places: dict[tuple[bool, str], Tensors] = {}
    for file, tensors in files.items():
        is_own = file.startswith("mtp")
        for name, tensor in tensors.items():
            prefix = _prefix_of(name, prefixes, is_own=is_own)
            if prefix is not None:
                places.setdefault((not is_own, prefix), {})[name.removeprefix(prefix)] = tensor
    if len(places) > 1:
        logger.info("the checkpoint holds %d copies of its head's weights; one is used", len(places))
    return dequantised_fp8(places[min(places)]) if places else {}


def dequantised_fp8(tensors: Tensors) -> Tensors:
    """Undo 8-bit floats with one scale per square of 128: nothing here multiplies by them as they are."""
    plain = dict(tensors)
    for name in [name for name in tensors if name.endswith(".weight_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        plain[weight] = _unscaled(tensors[weight], plain.pop(name))
    return plain


def _unscaled(weight: mx.array, scale: mx.array) -> mx.array:
    rows, columns = weight.shape
    values = mx.from_fp8(weight, dtype=mx.float32)
    scale = mx.repeat(mx.repeat(scale.astype(mx.float32), _FP8_BLOCK, axis=0), _FP8_BLOCK, axis=1)
    return (values * scale[:rows, :columns]).astype(mx.bfloat16)


def _prefix_of(name: str, prefixes: Sequence[str], *, is_own: bool) -> str | None:
    """What to cut off a tensor's name, or None where it is none of the head's."""
    known = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
    return "" if known is None and is_own else known


def _load(file: Path) -> Tensors:
    try:
        loaded: Any = mx.load(str(file))
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    return dict(loaded)
