"""Weights in 8-bit floats with scales, against a calculation in NumPy. Arrays only."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mtplx_core.errors import ModelLoadError
from mtplx_core.heads.experts import stacked_experts
from mtplx_core.heads.tensors import dequantised_fp8
from tests.mtplx_core.heads.reference_heads import Floats

SQUARE = 128


def e4m3(codes: Floats) -> Floats:
    """What 8 bits mean: a sign, 4 bits of exponent with a bias of 7, 3 of fraction."""
    bits = codes.astype(np.int64)
    sign, exponent, fraction = np.where(bits & 128, -1.0, 1.0), bits >> 3 & 15, bits & 7
    normal = (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return np.where(exponent > 0, normal, fraction / 8 * 2.0**-6) * sign


def scaled(codes: Floats, scale: Floats) -> Floats:
    """Value by value."""
    wanted = e4m3(codes)
    for place in np.ndindex(wanted.shape):
        row, column = place[-2] // SQUARE, place[-1] // SQUARE
        wanted[place] *= scale[(*place[:-2], row, column)]
    return wanted


def random_codes(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """None of the two that mean no number."""
    codes = rng.integers(0, 127, shape) + 128 * rng.integers(0, 2, shape)
    return np.asarray(codes, np.float64)


def as_bytes(codes: Floats) -> mx.array:
    return mx.array(codes.astype(np.uint8))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("fc.weight", (200, 130)),
        ("layers.0.mlp.experts.gate_up_proj", (3, 260, 129)),
        ("layers.0.mlp.switch_mlp.up_proj.weight", (2, 128, 300)),
        ("layers.0.mlp.experts.down_proj", (4, 20, 10)),
    ],
)
def test_weights_are_brought_back_square_by_square(name: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(5)
    codes = random_codes(rng, shape)
    squares = (*shape[:-2], *(-(-size // SQUARE) for size in shape[-2:]))
    scale = rng.uniform(0.001, 2.0, squares)

    plain = dequantised_fp8({name: as_bytes(codes), f"{name}_scale_inv": mx.array(scale, mx.float32)})

    assert plain.keys() == {name}
    found = np.array(plain[name].astype(mx.float32), np.float64)
    np.testing.assert_allclose(found, scaled(codes, scale), rtol=2**-8)  # what bfloat16 keeps


@pytest.mark.parametrize("shape", [(1,), (), (2, 1, 1)], ids=str)
def test_one_scale_may_be_for_a_whole_matrix(shape: tuple[int, ...]) -> None:
    codes = random_codes(np.random.default_rng(6), (2, 200, 150))
    scale = np.linspace(0.5, 0.25, max(int(np.prod(shape)), 1)).reshape(shape)

    plain = dequantised_fp8({"up": as_bytes(codes), "up_scale_inv": mx.array(scale, mx.float32)})

    by_expert = np.broadcast_to(scale.reshape(-1, 1, 1), (2, 1, 1))
    np.testing.assert_allclose(np.array(plain["up"].astype(mx.float32)), e4m3(codes) * by_expert, rtol=2**-8)


def test_fused_experts_in_eight_bits_come_out_as_a_stack_for_each_projection() -> None:
    rng = np.random.default_rng(7)
    fused, scale = random_codes(rng, (2, 256, 128)), rng.uniform(0.1, 1.0, (2, 2, 1))
    tensors = {
        "layers.0.mlp.experts.gate_up_proj": as_bytes(fused),
        "layers.0.mlp.experts.gate_up_proj_scale_inv": mx.array(scale, mx.bfloat16),
    }

    stacked = stacked_experts(dequantised_fp8(tensors))

    assert {name.rsplit(".", 2)[1]: array.shape for name, array in stacked.items()} == {
        "gate_proj": (2, 128, 128),
        "up_proj": (2, 128, 128),
    }


@pytest.mark.parametrize(
    "scale", [(2, 3, 1), (3, 2, 1), (2, 1), (2, 2, 2)], ids=["rows", "experts", "a matrix", "columns"]
)
def test_scales_of_another_size_of_square_are_refused(scale: tuple[int, ...]) -> None:
    tensors = {"up": mx.zeros((2, 256, 128), mx.uint8), "up_scale_inv": mx.ones(scale)}

    with pytest.raises(ModelLoadError, match=r"the head's up, \(2, 256, 128\), has scales .* not per 128 x 128"):
        dequantised_fp8(tensors)


def test_scales_without_their_weight_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="up_scale_inv without up"):
        dequantised_fp8({"up_scale_inv": mx.ones((1, 1))})
