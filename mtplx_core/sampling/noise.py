"""The noise of sampling: Gumbel numbers that are a function of (seed, position in the completion, token id) alone.

A counter-based integer hash, not a stream of random numbers: any subset of tokens, any width of batch and any restart
sees the same numbers. It owns no sampling parameters and no logits.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

logger = logging.getLogger(__name__)

# Multipliers of two well-mixing 32-bit permutations; shifts of 16, 15, 16 go with them.
_MIX_A = 0x7FEB352D
_MIX_B = 0x846CA68B
_WEYL = 0x9E3779B9
_MASK32 = 0xFFFFFFFF
_SERIES_BELOW = 2.0**-6


def seed_words(seeds: Sequence[int]) -> mx.array:
    """64-bit seeds as (rows, 2) uint32: low word, high word."""
    return mx.array([[seed & _MASK32, (seed >> 32) & _MASK32] for seed in seeds], mx.uint32)


def noise_keys(seeds: mx.array, positions: mx.array) -> mx.array:
    """One key per position.

    Args:
        seeds: (rows, 2) uint32, from `seed_words`.
        positions: (rows, positions) of the completion, counted from 0; any integer type.

    Returns:
        (rows, positions, 2) uint32
    """
    low, high = seeds[:, :1], seeds[:, 1:]
    position = positions.astype(mx.uint32)
    # Counted from 1: zeros would hash to zeros, and a token of no bits always wins.
    first = _mix(_mix(_mix((position + _u32(1)) * _u32(_WEYL) + low) ^ high) + position)
    second = _mix(_mix(first + high) ^ low)
    return mx.stack([first, second], axis=-1)


def noise_bits(keys: mx.array, token_ids: mx.array) -> mx.array:
    """32 hashed bits for each key and token: (..., 2) uint32 and (tokens,) give (..., tokens) uint32."""
    ids = token_ids.astype(mx.uint32)
    return _mix(_mix(ids ^ keys[..., :1]) + keys[..., 1:])


def gumbel(keys: mx.array, token_ids: mx.array) -> mx.array:
    """Standard Gumbel noise, float32, shaped as `noise_bits`.

    It is -log E with E = -log1p(-u) exponential, u = (bits + 1/2) / 2^32. Winners have small u, where float32 is fine
    enough to tell all of them apart; at the other end E rounds to infinity at worst, and then the token cannot win.
    """
    uniforms, exponentials = _stages()
    u, rest = uniforms(keys, token_ids)
    return -mx.log(exponentials(u, mx.log(rest)))


Stage = Callable[[mx.array, mx.array], Any]


@functools.cache
def _stages() -> tuple[Stage, Stage]:
    """The element-wise stages around the logarithms, fused where this machine can compile them.

    MLX's own logarithm is faster than one inside a fused kernel, so it stays outside. On a CPU fusing needs a C++
    compiler; without one the stages run operation by operation and give the same numbers up to rounding.
    """
    fused: tuple[Stage, Stage] = (mx.compile(_uniforms), mx.compile(_exponentials))
    try:
        u, rest = fused[0](mx.zeros((1, 1, 2), mx.uint32), mx.arange(2, dtype=mx.uint32))
        mx.eval(fused[1](u, rest))
    except RuntimeError as error:
        logger.info("sampling noise runs unfused, which costs a few milliseconds per step: %s", error)
        return _uniforms, _exponentials
    return fused


def _uniforms(keys: mx.array, token_ids: mx.array) -> tuple[mx.array, mx.array]:
    u = (noise_bits(keys, token_ids).astype(mx.float32) + 0.5) * 2.0**-32
    return u, 1.0 - u


def _exponentials(u: mx.array, log_rest: mx.array) -> mx.array:
    """-log1p(-u): a series where 1 - u has lost the digits of u, the logarithm of 1 - u elsewhere."""
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * 0.25)))
    return mx.where(u < _SERIES_BELOW, series, -log_rest)


def _mix(x: mx.array) -> mx.array:
    x = (x ^ (x >> _u32(16))) * _u32(_MIX_A)
    x = (x ^ (x >> _u32(15))) * _u32(_MIX_B)
    return x ^ (x >> _u32(16))


def _u32(value: int) -> mx.array:
    # A bare Python int would promote uint32 to a wider or signed type.
    return mx.array(value, mx.uint32)
