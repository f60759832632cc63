"""The tie between an attached head and its trunk: a few rows of the trunk's own matrices, kept with the head.

A finetune changes what a head has learnt to expect and often leaves the norms as they were, so matrices are compared
too. Dtype and quantisation may differ: rounding is expected, and how much of it depends on the trunk in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import mlx.core as mx

_ROWS = 2
"""Of each matrix; spread over it."""
_EQUAL_SHARE = 0.9
"""Of the values of a trunk that is not quantised, equal after rounding; half types lose the smallest ones."""
_STEP = 3.0
"""Error of rounding to n bits, against the values' own size: at most this over 2^n - 1, twice what is usual."""


class Strain(NamedTuple):
    """How far one matrix is from what the head was trained beside."""

    name: str
    excess: float
    """Above 1: more than rounding explains."""


def sample_trunk(model: Any) -> dict[str, mx.array]:
    """What is kept: two rows of each matrix of the first, middle and last layer and of the embedding, bfloat16."""
    return {name: _rows(module).astype(mx.bfloat16) for name, module in _matrices(model)}


def worst_strain(model: Any, sample: Mapping[str, mx.array]) -> Strain:
    """The matrix that fits least. A sample of other matrices, or of none, does not fit at all."""
    here = dict(_matrices(model))
    if not sample or sample.keys() != here.keys():
        return Strain(next(iter(sample.keys() ^ here.keys()), "matrices"), float("inf"))
    strains = [Strain(name, _excess(module, sample[name])) for name, module in here.items()]
    return max(strains, key=lambda strain: strain.excess)


def _excess(module: Any, kept: mx.array) -> float:
    found = _rows(module)
    if found.shape != kept.shape:
        return float("inf")
    wanted = kept.astype(mx.float32)
    if "scales" in module:
        error: Any = (mx.linalg.norm(found - wanted) / mx.maximum(mx.linalg.norm(wanted), 1e-12)).item()
        return float(error) * (2.0 ** int(module.bits) - 1) / _STEP
    differing: Any = mx.mean(found.astype(mx.bfloat16) != kept).item()
    return float(differing) / (1 - _EQUAL_SHARE)


def _rows(module: Any) -> mx.array:
    """(rows, inputs) float32"""
    count = module.weight.shape[0]
    at = mx.array([(2 * place + 1) * count // (2 * _ROWS) for place in range(_ROWS)], mx.int32)
    if "scales" not in module:
        rows: mx.array = module.weight[at]
        return rows.astype(mx.float32)
    biases = module.biases[at] if module.get("biases") is not None else None
    whole = mx.dequantize(
        module.weight[at], module.scales[at], biases, module.group_size, module.bits, mode=module.mode
    )
    return whole.astype(mx.float32)


def _matrices(model: Any) -> Iterator[tuple[str, Any]]:
    """Modules with a matrix of weights, quantised or not; expert stacks have three axes and are passed over."""
    count = len(model.layers)
    kept = {id(model.layers[index]) for index in (0, count // 2, count - 1)}
    inside = {id(module): id(layer) for layer in model.layers for module in layer.modules()}
    for name, module in sorted(model.named_modules()):
        if inside.get(id(module), next(iter(kept))) not in kept or "weight" not in module:
            continue
        if module.weight.ndim == 2:
            yield name, module
