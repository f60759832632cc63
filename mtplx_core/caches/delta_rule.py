"""The gated delta rule over a few positions at once, and again over some of them: products of matrices.

What each position writes into the state depends on the state before all of them and on what earlier ones wrote, so one
product with the state serves every position. What they wrote is kept; the state behind any number of them is one more
product. mlx-lm's own update without a kernel goes over the whole state several times for every position.

Source: S. Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024), equation 10: with the decay g,
the writing strength beta, and the state S as (value size, key size),
`S[t] = g[t] * S[t-1] + u[t] k[t]^T`, `u[t] = beta[t] * (v[t] - g[t] * S[t-1] k[t])`, and the output is `S[t] q[t]`.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
from mlx_lm.models.gated_delta import compute_g


class Written(NamedTuple):
    """What positions wrote, as a state behind some of them needs it; (rows, value heads, positions, ...) each."""

    values: mx.array
    """u above; the last axis is the value size."""
    keys: mx.array
    decay: mx.array
    """Last axis 1."""

    @property
    def positions(self) -> int:
        return int(self.keys.shape[2])

    def behind(self, state: mx.array, taken: mx.array | None = None) -> mx.array:
        """The state behind the first `taken` (rows,) positions; None: behind all.

        Args:
            state: before the first position, (rows, value heads, value size, key size).
        """
        values, decay = self.values, self.decay
        if taken is not None:
            is_taken = (mx.arange(self.positions, dtype=taken.dtype) < taken[:, None])[:, None, :, None]
            values, decay = mx.where(is_taken, values, 0), mx.where(is_taken, decay, 1)
        if self.positions == 1:
            return state * decay + values.swapaxes(-1, -2) * self.keys
        later = mx.cumprod(decay, axis=2, reverse=True, inclusive=False)
        return state * (later * decay)[:, :, :1] + (values * later).swapaxes(-1, -2) @ self.keys


def delta_rule(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    *,
    state: mx.array,
) -> tuple[mx.array, Written]:
    """Outputs, (rows, positions, value heads, value size), of what mlx-lm's `gated_delta_update` computes.

    Args:
        q: (rows, positions, key heads, key size), k likewise.
        v: (rows, positions, value heads, value size).
        a: (rows, positions, value heads), b likewise.
        A_log: (value heads,), dt_bias likewise.
        state: (rows, value heads, value size, key size) float32.
    """
    positions, dtype = v.shape[1], state.dtype
    repeats = v.shape[2] // k.shape[2]
    q, k, v = (part.swapaxes(1, 2).astype(dtype) for part in (q, k, v))
    if repeats > 1:
        q, k = mx.repeat(q, repeats, axis=1), mx.repeat(k, repeats, axis=1)
    decay = compute_g(A_log, a, dt_bias).swapaxes(1, 2)[..., None]
    beta = mx.sigmoid(b).swapaxes(1, 2)[..., None]
    asked = mx.concatenate([k, q], axis=2)
    crossing = asked @ k.swapaxes(-1, -2)  # (rows, value heads, keys and then queries, keys)
    answers = asked @ state.swapaxes(-1, -2)  # by the state behind the positions gone through so far
    values, outputs = list[mx.array](), list[mx.array]()
    for at in range(positions):
        here = slice(at, at + 1)
        answers = answers * decay[:, :, here]
        values.append(beta[:, :, here] * (v[:, :, here] - answers[:, :, here]))
        answers = answers + crossing[:, :, :, here] * values[-1]
        outputs.append(answers[:, :, positions + at : positions + at + 1])
    output = mx.concatenate(outputs, axis=2).swapaxes(1, 2)
    return output, Written(mx.concatenate(values, axis=2), k, decay)
