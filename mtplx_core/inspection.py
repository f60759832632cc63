"""Says what a checkpoint is and what could run it, from its configuration and the outlines of its tensors.

No forward is run and no weight is read but the few gains of a head's norms, unless the modes are to be checked. The
model that is asked how much it keeps is an empty one made from the configuration; its own random weights are never made
either.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mtplx_core.build import mode_refusal
from mtplx_core.caches.row_bytes import cache_bytes
from mtplx_core.engine import Geometry, SchedulerMode
from mtplx_core.errors import ModelLoadError
from mtplx_core.heads import mimo, qwen
from mtplx_core.heads.base import Head
from mtplx_core.heads.native import MIMO, family_of, stored_head
from mtplx_core.heads.tensors import Tensors, has_bare_names, load_files
from mtplx_core.models.loader import has_experts, is_local, load_model, model_classes, read_weights, text_config
from mtplx_core.models.padding import padding_refusal
from mtplx_core.models.trunk import Trunk, unsupported_reason
from mtplx_core.mtp.device_batch import DeviceBatch

_FLOATS = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
_PACKED = {"U32": mx.uint32, "I32": mx.int32, "U8": mx.uint8, "F8_E4M3": mx.uint8, "I64": mx.int64}
_UNUSED = ("vision_tower", "visual", "mtp", "mtp_layers")
"""Parts of names that mlx-lm's text models leave behind."""
_NEXT_LAYERS = "num_nextn_predict_layers"


class Outline(NamedTuple):
    """A tensor as a file's header describes it."""

    dtype: str
    shape: tuple[int, ...]


class Hub(Protocol):
    """Reads a repository on the hub without fetching its weights."""

    def config(self, repository: str) -> dict[str, Any]: ...

    def outlines(self, repository: str) -> dict[str, dict[str, Outline]]:
        """Tensors by file and name."""


class ModeVerdict(NamedTuple):
    """Whether a scheduler mode can run the model."""

    mode: str
    reason: str
    """Why not; empty where it can."""
    row_bytes: int
    """Memory of one row; 0 where it cannot."""


class HeadVerdict(NamedTuple):
    """What is known of the checkpoint's own head."""

    is_usable: bool
    tensors: int
    size_bytes: int
    norms: str
    """How its norms look to be stored; what counts is measured when the lane starts."""
    quantisation: str
    reason: str
    """Why it is not used, or why there is none."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything `inspect_model` found."""

    model: str
    family: str
    has_experts: bool
    quantisation: str
    weight_bytes: int
    context_tokens: int
    depth: int
    head: HeadVerdict
    modes: tuple[ModeVerdict, ...]
    is_checked: bool = False
    """Whether each mode's self-test was run; else a lane runs it when it starts."""


class _Checkpoint(NamedTuple):
    name: str
    config: dict[str, Any]
    files: dict[str, Tensors]
    has_values: bool

    @property
    def tensors(self) -> Tensors:
        """Of all files but those in which a head lies under bare names."""
        files = {file: tensors for file, tensors in self.files.items() if not has_bare_names(file, tensors)}
        return {name: tensor for tensors in files.values() for name, tensor in tensors.items()}


def inspect_model(source: str, *, hub: Hub, context_tokens: int, depth: int, is_checked: bool = False) -> Inspection:
    """Look at a folder, or at a hub id without fetching its weights.

    Args:
        context_tokens: length of the row whose memory is told.
        depth: most tokens drafted per row and cycle, on the MTP lane.
        is_checked: load the folder's weights and run each mode's self-test, as a worker does when it starts.

    Raises:
        ModelLoadError: it is not there, cannot be read, or is to be checked and no folder.
    """
    checkpoint = _open(source, hub)
    config, trunk_tensors = checkpoint.config, _trunk_tensors(checkpoint.tensors)
    geometry = Geometry(1, context_tokens, depth)
    model, reason = _empty_model(config, trunk_tensors)
    trunk = None if model is None or unsupported_reason(model) else Trunk(model)
    head, verdict = _inspect_head(checkpoint, trunk)
    if model is None:
        modes = tuple(ModeVerdict(mode.value, reason, 0) for mode in SchedulerMode)
    else:
        modes = (
            ModeVerdict(SchedulerMode.SERIAL.value, "", cache_bytes(model).of(context_tokens)),
            _ar_verdict(model, context_tokens),
            _mtp_verdict(model, trunk, head, geometry),
        )
    if is_checked:
        modes = _checked(source, modes)
    return Inspection(
        model=checkpoint.name,
        family=str(config.get("model_type", "unknown")),
        has_experts=has_experts(config),
        quantisation=_quantisation(config, trunk_tensors),
        weight_bytes=sum(tensor.nbytes for tensor in trunk_tensors.values()),
        context_tokens=context_tokens,
        depth=depth,
        head=verdict,
        modes=modes,
        is_checked=is_checked,
    )


def _checked(source: str, modes: Sequence[ModeVerdict]) -> tuple[ModeVerdict, ...]:
    """The verdicts with the word of the self-test, where nothing else speaks against a mode."""
    if not is_local(source):
        raise ModelLoadError(f"{source} is no folder: only weights that are here can be checked")
    loaded = load_model(source)
    read_weights(loaded)
    checked = []
    for verdict in modes:
        reason = verdict.reason or mode_refusal(SchedulerMode(verdict.mode), loaded)
        checked.append(ModeVerdict(verdict.mode, reason, 0) if reason else verdict)
    return tuple(checked)


def _open(source: str, hub: Hub) -> _Checkpoint:
    if not is_local(source):
        outlines = hub.outlines(source)
        files = {file: {name: _stand_in(o) for name, o in tensors.items()} for file, tensors in outlines.items()}
        return _Checkpoint(source, hub.config(source), files, has_values=False)
    folder = Path(source).expanduser()
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"no readable config.json in {folder}: {error}") from error
    return _Checkpoint(folder.resolve().name, config, load_files(folder), has_values=True)


def _stand_in(outline: Outline) -> mx.array:
    """An array of that outline that is never evaluated."""
    dtype = _FLOATS.get(outline.dtype) or _PACKED.get(outline.dtype)
    if dtype is None:
        raise ModelLoadError(f"tensors of type {outline.dtype} are not known here")
    return mx.zeros(outline.shape, dtype)


def _trunk_tensors(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not set(_UNUSED) & set(name.split("."))}


def _empty_model(config: dict[str, Any], tensors: Tensors) -> tuple[Any, str]:
    """mlx-lm's model of this configuration without weights, or why there is none."""
    try:
        kind, args_kind = model_classes(json.loads(json.dumps(config)))
        model = kind(args_kind.from_dict(json.loads(json.dumps(config))))
    except Exception as error:  # whatever a foreign configuration makes mlx-lm raise
        return None, f"mlx-lm cannot make this model: {error}"
    floats = [t.dtype for name, t in tensors.items() if name.endswith("norm.weight") and t.dtype in _FLOATS.values()]
    model.set_dtype(floats[0] if floats else mx.bfloat16)
    model.eval()
    return model, ""


def _ar_verdict(model: Any, context_tokens: int) -> ModeVerdict:
    kinds = sorted({type(cache).__name__ for cache in make_prompt_cache(model) if not hasattr(cache, "merge")})
    if kinds:
        return ModeVerdict(SchedulerMode.AR_BATCH.value, f"mlx-lm cannot batch its {', '.join(kinds)}", 0)
    if reason := padding_refusal(model):
        return ModeVerdict(SchedulerMode.AR_BATCH.value, reason, 0)
    return ModeVerdict(SchedulerMode.AR_BATCH.value, "", cache_bytes(model).of(context_tokens))


def _mtp_verdict(model: Any, trunk: Trunk | None, head: Head | None, geometry: Geometry) -> ModeVerdict:
    if trunk is None:
        return ModeVerdict(SchedulerMode.MTP_BATCH.value, unsupported_reason(model) or "", 0)
    row_bytes = DeviceBatch(trunk, geometry, head).row_bytes(geometry.max_context_tokens)
    return ModeVerdict(SchedulerMode.MTP_BATCH.value, "", row_bytes)


def _inspect_head(checkpoint: _Checkpoint, trunk: Trunk | None) -> tuple[Head | None, HeadVerdict]:
    tensors = stored_head(checkpoint.files, checkpoint.config)
    if not tensors:
        return None, HeadVerdict(False, 0, 0, "", "", _why_none(checkpoint.config))
    size = sum(tensor.nbytes for tensor in tensors.values())
    quantised = _quantisation(checkpoint.config, tensors)
    if trunk is None:
        return None, HeadVerdict(False, len(tensors), size, "", quantised, "its trunk cannot run on mtp_batch")
    try:
        head, norms = _build(checkpoint, trunk, tensors)
    except ModelLoadError as error:
        return None, HeadVerdict(False, len(tensors), size, "", quantised, str(error))
    return head, HeadVerdict(True, len(tensors), size, norms, quantised, "")


def _build(checkpoint: _Checkpoint, trunk: Trunk, tensors: Tensors) -> tuple[Head, str]:
    if family_of(checkpoint.config) is MIMO:
        return mimo.load_mimo_head(trunk, tensors), "as they are"
    stored = qwen.StoredQwenHead(trunk, tensors, {**checkpoint.config, **text_config(checkpoint.config)})
    if not checkpoint.has_values:
        return stored.head, "known once the weights are here"
    likely = stored.conventions[0].raw
    return stored.head, f"{len(likely)} of {len(qwen.NORMS)} less one"


def _why_none(config: Mapping[str, Any]) -> str:
    described = {**config, **text_config(config)}
    if family_of(config) is not None:
        return "no weights of one in the checkpoint"
    if described.get(_NEXT_LAYERS):
        return f"the checkpoint may bring one, in a layout that is not read here ({config.get('model_type')})"
    return "this family brings none"


def _quantisation(config: Mapping[str, Any], tensors: Tensors) -> str:
    scaled = [name for name in tensors if name.endswith((".scales", "_scale_inv"))]
    dtypes = sorted({str(t.dtype).removeprefix("mlx.core.") for t in tensors.values() if t.dtype in _FLOATS.values()})
    if not scaled:
        return f"none, {', '.join(dtypes)}"
    described = config.get("quantization") or config.get("quantization_config") or {}
    method = described.get("mode") or described.get("quant_method") or "affine"
    bits = described.get("bits")
    return f"{method}, {bits} bits, groups of {described.get('group_size')}" if bits else str(method)
