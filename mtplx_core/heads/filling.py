"""Fills a head's modules with the tensors of a checkpoint, quantised ones as they are stored."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten
from mlx_lm.utils import infer_quant_config

from mtplx_core.errors import ModelLoadError
from mtplx_core.heads.tensors import Tensors

nn: Any = mlx.nn

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def fill(head: Any, tensors: Tensors, *, dtype: mx.Dtype) -> None:
    """Load every tensor into its module; layers whose tensors come with scales become quantised ones.

    Args:
        dtype: the trunk's; scales too are kept in it, or every product would come out in another type.

    Raises:
        ModelLoadError: names or shapes are not the head's.
    """

    def stored(path: str, module: Any) -> bool | dict[str, Any]:
        is_quantised = hasattr(module, "to_quantized") and f"{path}.scales" in tensors
        return infer_quant_config(path, module, tensors) if is_quantised else False

    try:
        nn.quantize(head, class_predicate=stored)
    except (ValueError, KeyError) as error:
        raise ModelLoadError(f"the head's quantisation cannot be read: {error}") from error
    _require_same(dict(tree_flatten(head.parameters())), tensors)
    head.load_weights([(name, t.astype(dtype) if t.dtype in _FLOATS else t) for name, t in tensors.items()])
    head.eval()


def _require_same(wanted: Tensors, found: Tensors) -> None:
    if missing := sorted(wanted.keys() - found.keys()):
        raise ModelLoadError(f"the head lacks {_some(missing)}")
    if unknown := sorted(found.keys() - wanted.keys()):
        raise ModelLoadError(f"the head has weights nobody uses: {_some(unknown)}")
    for name, tensor in found.items():
        if tensor.shape != wanted[name].shape:
            raise ModelLoadError(f"the head's {name} is {tensor.shape}, the model wants {wanted[name].shape}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
