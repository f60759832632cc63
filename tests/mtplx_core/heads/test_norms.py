"""How a stored head's norms are read: off the clear ones, never off those whose gains may lie anywhere. No engine."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mtplx_core.heads.norms import likely_conventions, true_gain
from mtplx_core.heads.qwen import NORMS, UNCLEAR_NORMS

PER_LAYER = NORMS[3:]
FINAL = "norm.weight"


def stored(means: dict[str, float]) -> dict[str, mx.array]:
    return {name: mx.full((8,), mean) for name, mean in means.items()}


def true_gains() -> dict[str, float]:
    """About what published heads have: the two norms before the projection far below one."""
    return {name: 1.1 for name in NORMS} | dict(zip(UNCLEAR_NORMS, (0.27, 0.49), strict=True))


def test_published_head_is_read_as_less_one() -> None:
    first = likely_conventions(stored({n: g - 1 for n, g in true_gains().items()}), unclear=UNCLEAR_NORMS)[0]

    assert first.raw == set(NORMS)


def test_converted_head_is_read_as_it_is_though_two_gains_are_small() -> None:
    first = likely_conventions(stored(true_gains()), unclear=UNCLEAR_NORMS)[0]

    assert first.raw == set()


def test_norms_before_the_projection_go_with_the_layer_where_the_final_one_was_shifted_alone() -> None:
    gains = {name: gain if name == FINAL else gain - 1 for name, gain in true_gains().items()}

    first = likely_conventions(stored(gains), unclear=UNCLEAR_NORMS)[0]

    assert first.raw == {*UNCLEAR_NORMS, *PER_LAYER}


def test_other_readings_are_offered_once_each() -> None:
    readings = [c.raw for c in likely_conventions(stored(true_gains()), unclear=UNCLEAR_NORMS)]

    assert readings == [frozenset(), frozenset(NORMS), frozenset(UNCLEAR_NORMS)]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_gain_is_what_is_stored_or_one_more(dtype: mx.Dtype) -> None:
    weight = mx.array([0.25, -0.5]).astype(dtype)

    assert true_gain(weight, is_raw=True).tolist() == [1.25, 0.5]
    assert true_gain(weight, is_raw=False).tolist() == [0.25, -0.5]
    assert true_gain(weight, is_raw=True).dtype == dtype
