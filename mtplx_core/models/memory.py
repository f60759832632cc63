"""How much memory a lane may use on this device, and MLX's buffer cache held to its share. MLX itself refuses nothing.

The wired limit is left alone: it is off by default, and setting it is what has been seen to bring Macs down.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import mlx.core as mx

from mtplx_core.engine import Geometry
from mtplx_core.errors import UnsupportedModeError

_GIB = 1 << 30
_SMALL_BYTES = 36 * _GIB
_SHARE, _SMALL_SHARE = 0.75, 0.67
"""Of the machine's memory; small machines keep more for everything else."""
_CACHE_SHARE, _CACHE_MOST = 0.05, 8 * _GIB
_TRANSIENT_SHARE = 0.04
"""For what a prefill chunk and a cycle make and drop."""
VERIFY_COPIES = 8
"""Arrays as large as its logits that a verify step with all sampling options has at once; 7.6 were seen."""
LEAST_TOKENS = 256
"""A lane whose rows could hold less is not worth running."""


class MemoryPlan(NamedTuple):
    """Bytes, by what they are for."""

    usable: int
    buffer_cache: int
    rows: int
    """For the caches of all rows together; what a lane may admit by the sum of `Engine.row_bytes`."""


def plan_memory(*, machine_bytes: int, recommended_bytes: int | None, weight_bytes: int) -> MemoryPlan:
    """Divide a machine's memory.

    Args:
        recommended_bytes: the GPU's own recommendation, where there is one.
    """
    share = _SMALL_SHARE if machine_bytes <= _SMALL_BYTES else _SHARE
    usable = int(machine_bytes * share)
    if recommended_bytes is not None:
        usable = min(usable, recommended_bytes)
    buffer_cache = min(int(usable * _CACHE_SHARE), _CACHE_MOST)
    rows = usable - weight_bytes - buffer_cache - int(usable * _TRANSIENT_SHARE)
    return MemoryPlan(usable, buffer_cache, max(rows, 0))


def plan_this_machine(*, weight_bytes: int) -> MemoryPlan:
    """Divide this machine's memory."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    info: Any = mx.device_info()
    recommended = info.get("max_recommended_working_set_size")
    return plan_memory(machine_bytes=machine, recommended_bytes=recommended, weight_bytes=weight_bytes)


def hold_buffer_cache(plan: MemoryPlan) -> None:
    """Bound what MLX keeps of freed buffers; unbounded, changing shapes pile up."""
    mx.set_cache_limit(plan.buffer_cache)


def fit_geometry(geometry: Geometry, *, memory_bytes: int, row_bytes: Callable[[int], int]) -> Geometry:
    """The rows of full length that the memory carries, at most those asked for; where not even one fits, a shorter one.

    All rows are laid out for the longest beside them, so any of them may come to take as much as the longest allowed.
    A row is there twice while it moves from its prefill into the batch, hence one more.

    Raises:
        UnsupportedModeError: there is no room for a row of `LEAST_TOKENS`.
    """
    tokens = geometry.max_context_tokens
    carried = memory_bytes // row_bytes(tokens) - 1
    if carried >= 1:
        return replace(geometry, decode_batch_max=min(geometry.decode_batch_max, carried))
    while tokens > LEAST_TOKENS and 2 * row_bytes(tokens) > memory_bytes:
        tokens -= LEAST_TOKENS
    if 2 * row_bytes(tokens) > memory_bytes:
        raise UnsupportedModeError(
            f"a row of {tokens} tokens takes {row_bytes(tokens)} bytes twice, {memory_bytes} are left for rows"
        )
    return replace(geometry, decode_batch_max=1, max_context_tokens=tokens)
