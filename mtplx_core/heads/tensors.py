"""Finds a head's own tensors in a checkpoint, under whichever prefix and in whichever file they were published.

Values stay on disk until they are used. What the tensors mean is not known here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mtplx_core.errors import ModelLoadError

logger = logging.getLogger(__name__)

Tensors = dict[str, mx.array]

_FP8_BLOCK = 128
_SCALE = "_scale_inv"
"""Behind the name of a weight, which in stacks of experts does not end in `.weight`."""
_HEAD_PARTS = {"mtp", "mtp_layers"}
"""Parts of the names of tensors that belong to a head."""
_TRUNK_PREFIXES = ("model.", "language_model.", "lm_head.")


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
    the head's own (`mtp.safetensors`, `model-mtp.safetensors`, `mtp/`), where names may also be bare, goes before the
    model's files.

    Args:
        files: of the checkpoint.
        prefixes: what the names may begin with.
    """
    places: dict[tuple[bool, str], Tensors] = {}
    for file, tensors in files.items():
        may_be_bare = has_bare_names(file, tensors)
        for name, tensor in tensors.items():
            prefix = _prefix_of(name, prefixes, may_be_bare=may_be_bare)
            if prefix is not None:
                places.setdefault((not _is_own(file), prefix), {})[name.removeprefix(prefix)] = tensor
    if len(places) > 1:
        logger.info("the checkpoint holds %d copies of its head's weights; one is used", len(places))
    return dequantised_fp8(places[min(places)]) if places else {}


def has_bare_names(file: str, names: Iterable[str]) -> bool:
    """Whether a file is of the head's own and names its tensors as the head does, without a prefix.

    A file of the trunk that happens to be called so has a trunk's names.
    """
    return _is_own(file) and not any(name.startswith(_TRUNK_PREFIXES) or is_head_name(name) for name in names)


def is_head_name(name: str) -> bool:
    """Whether a tensor's full name says that it belongs to a head."""
    return bool(_HEAD_PARTS & set(name.split(".")))


def dequantised_fp8(tensors: Tensors) -> Tensors:
    """Undo 8-bit floats with one scale per square of 128, or one for all: nothing here multiplies by them as they are.

    Raises:
        ModelLoadError: a scale does not fit its weight, or has none.
    """
    plain = dict(tensors)
    for name in [name for name in tensors if name.endswith(_SCALE)]:
        weight = name.removesuffix(_SCALE)
        if weight not in tensors:
            raise ModelLoadError(f"the head has {name} without {weight}")
        plain[weight] = _unscaled(weight, tensors[weight], plain.pop(name))
    return plain


def _unscaled(name: str, weight: mx.array, scale: mx.array) -> mx.array:
    """A weight, (outputs, inputs) or (experts, outputs, inputs), times its scale, with an axis of squares for each."""
    scale = scale.astype(mx.float32)
    if scale.size == 1:
        scale = scale.reshape((1,) * weight.ndim)
    fits = scale.ndim == weight.ndim and scale.shape[:-2] in (weight.shape[:-2], (1,) * (weight.ndim - 2))
    for axis in (-2, -1) if fits else ():
        size, squares = weight.shape[axis], scale.shape[axis]
        if squares == -(-size // _FP8_BLOCK):
            scale = mx.repeat(scale, _FP8_BLOCK, axis=axis)
            scale = scale[..., :size, :] if axis == -2 else scale[..., :size]
        else:
            fits = fits and squares == 1
    if not fits:
        raise ModelLoadError(f"the head's {name}, {weight.shape}, has scales {scale.shape} that are not per 128 x 128")
    return (mx.from_fp8(weight, dtype=mx.float32) * scale).astype(mx.bfloat16)


def _prefix_of(name: str, prefixes: Sequence[str], *, may_be_bare: bool) -> str | None:
    """What to cut off a tensor's name, or None where it is none of the head's."""
    known = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
    return "" if known is None and may_be_bare else known


def _is_own(file: str) -> bool:
    """Whether a path in a checkpoint says that the file is the head's."""
    folder, _, name = file.rpartition("/")
    return folder == "mtp" or name.startswith("mtp") or "mtp" in re.split(r"[-_.]", name)


def _load(file: Path) -> Tensors:
    try:
        loaded: Any = mx.load(str(file))
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    return dict(loaded)
