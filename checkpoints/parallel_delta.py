"""The gated delta rule over many positions at once: products of matrices where mlx-lm's update goes step by step.

For training on a CPU, where a step of a loop costs more than what it computes. The outcome is the same up to rounding.
`mtplx_core.caches.delta_rule` is for the few positions of a verify step: fewer operations, and a part of them can be
taken.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn

nn: Any = mlx.nn

CHUNK = 64


def parallel_delta_update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    decay: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    **_: Any,
) -> tuple[mx.array, mx.array]:
    """As mlx-lm's `gated_delta_update`; masks are not taken.

    Args:
        q: (rows, positions, key heads, key size), k likewise.
        v: (rows, positions, value heads, value size).
        a: (rows, positions, value heads), b likewise.
    """
    assert mask is None
    positions, value_heads = v.shape[1:3]
    repeats = value_heads // q.shape[2]
    q, k = (mx.repeat(part, repeats, axis=2).swapaxes(1, 2) for part in (q, k))
    v = v.swapaxes(1, 2)  # (rows, heads, positions, size)
    beta = mx.sigmoid(b).swapaxes(1, 2)[..., None]
    # Not by way of the decay itself, which may be too small for a float.
    log_decay = -(mx.exp(decay) * nn.softplus(a + dt_bias)).swapaxes(1, 2)
    if state is None:
        state = mx.zeros((v.shape[0], value_heads, v.shape[3], k.shape[3]))
    outputs = []
    for start in range(0, positions, CHUNK):
        part = slice(start, start + CHUNK)
        out, state = _chunk(q[:, :, part], k[:, :, part], v[:, :, part], beta[:, :, part], log_decay[:, :, part], state)
        outputs.append(out)
    return mx.concatenate(outputs, axis=2).swapaxes(1, 2), state


def _chunk(
    q: mx.array, k: mx.array, v: mx.array, beta: mx.array, log_decay: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """What every position writes depends linearly on what earlier ones wrote: one triangular system for all."""
    count = q.shape[2]
    total = mx.cumsum(log_decay, axis=-1)  # (rows, heads, positions)
    between = total[..., :, None] - total[..., None, :]
    at_or_before = mx.tril(mx.ones((count, count)))
    faded = mx.exp(mx.where(at_or_before > 0, between, -1e9))
    kept = mx.exp(total)[..., None]
    keys = k.swapaxes(-1, -2)
    crossing = beta * faded * (k @ keys) * mx.tril(mx.ones((count, count)), k=-1)
    written = _solve(crossing, beta * (v - kept * (k @ state.swapaxes(-1, -2))))
    out = kept * (q @ state.swapaxes(-1, -2)) + (faded * (q @ keys)) @ written
    left = mx.exp(total[..., -1:] - total)[..., None]
    state = kept[..., -1:, :] * state + (left * written).swapaxes(-1, -2) @ k
    return out, state


def _solve(lower: mx.array, right: mx.array) -> mx.array:
    """x of (1 + lower) x = right, `lower` strictly triangular: a product of powers, which end at the size."""
    x, power = right - lower @ right, lower
    reach = 2
    while reach < lower.shape[-1]:
        power = power @ power
        x = x + power @ x
        reach *= 2
    return x
