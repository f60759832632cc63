"""How a checkpoint stores the gains of a head's norms: as they are, or less one. Nothing in it says which.

A mistake raises nothing and leaves a head that is right about never. So the likely reading is only a first guess, and
the last word has the head's measured agreement with its trunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

_RAW_BELOW = 0.5
"""Mean of a stored gain; a gain itself is about one, what is stored less one about nothing."""


class Convention(NamedTuple):
    """Which norms are stored less one."""

    name: str
    raw: frozenset[str]


def likely_conventions(gains: Mapping[str, mx.array], *, unclear: Sequence[str]) -> list[Convention]:
    """Readings of a checkpoint's norms, likeliest first, no two the same.

    Args:
        gains: all norms by name.
        unclear: those whose true gains may lie anywhere, so that their mean says nothing; they go with most others.
    """
    everything, open_ones = frozenset(gains), frozenset(unclear)
    clear = sorted(everything - open_ones)
    raw = frozenset(name for name in clear if _mean(gains[name]) < _RAW_BELOW)
    others = open_ones & everything
    by_majority = raw | others if 2 * len(raw) > len(clear) else raw
    flipped = by_majority - others if others <= by_majority else by_majority | others
    readings = [
        Convention("read off each norm", by_majority),
        Convention("all less one", everything),
        Convention("all as they are", frozenset()),
        Convention("input norms unlike the others", flipped),
    ]
    return [reading for place, reading in enumerate(readings) if reading.raw not in {r.raw for r in readings[:place]}]


def true_gain(stored: mx.array, *, is_raw: bool) -> mx.array:
    """Added in float32: half types would round the sum twice."""
    return (stored.astype(mx.float32) + 1.0).astype(stored.dtype) if is_raw else stored


def _mean(gain: mx.array) -> float:
    mean: Any = mx.mean(gain.astype(mx.float32)).item()
    return float(mean)
