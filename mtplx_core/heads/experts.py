"""Brings the weights of a mixture of experts into the one layout mlx-lm runs: a stack per projection."""

from __future__ import annotations

import re

import mlx.core as mx

from mtplx_core.errors import ModelLoadError
from mtplx_core.heads.tensors import Tensors

_PART = r"(?P<part>\.weight|\.scales|\.biases|)"
_FUSED = re.compile(rf"(?P<mlp>.*\.mlp)\.(?:experts|switch_mlp)\.(?P<which>gate_up_proj|down_proj){_PART}$")
_SINGLE = re.compile(r"(?P<mlp>.*\.mlp)\.experts\.(?P<expert>\d+)\.(?P<rest>\w+_proj\.\w+)$")


def stacked_experts(tensors: Tensors) -> Tensors:
    """The same tensors with experts under `switch_mlp`, (experts, outputs, inputs) each.

    They may come one by one (`experts.3.up_proj.weight`), fused (`experts.gate_up_proj`, gate first) or stacked.

    Raises:
        ModelLoadError: experts are missing.
    """
    plain: Tensors = {}
    singles: dict[str, dict[int, mx.array]] = {}
    for name, tensor in tensors.items():
        if single := _SINGLE.match(name):
            stack = singles.setdefault(f"{single['mlp']}.switch_mlp.{single['rest']}", {})
            stack[int(single["expert"])] = tensor
        elif fused := _FUSED.match(name):
            plain |= _unfused(fused, tensor)
        else:
            plain[name] = tensor
    for name, stack in singles.items():
        if sorted(stack) != list(range(len(stack))):
            raise ModelLoadError(f"experts are missing: {name} has {sorted(stack)}")
        plain[name] = mx.stack([stack[expert] for expert in range(len(stack))])
    return plain


def has_experts(tensors: Tensors) -> bool:
    """Of stacked ones."""
    return any(".mlp.switch_mlp." in name for name in tensors)


def _unfused(fused: re.Match[str], tensor: mx.array) -> Tensors:
    """Quantised parts too are split by output, which is their last axis but one."""
    prefix, part = f"{fused['mlp']}.switch_mlp", fused["part"] or ".weight"
    if fused["which"] == "down_proj":
        return {f"{prefix}.down_proj{part}": tensor}
    gate, up = mx.split(tensor, 2, axis=-2)
    return {f"{prefix}.gate_proj{part}": gate, f"{prefix}.up_proj{part}": up}
