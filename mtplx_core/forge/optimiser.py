"""Muon for matrices, Adam for gains, and an average of the weights; state is one flat dictionary of arrays.

Muon moves a matrix by its momentum with all singular values set to about one.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

Arrays = dict[str, mx.array]

_MOMENTUM = 0.95
_BETAS = (0.9, 0.98)
_EPSILON = 1e-8
_SQUARINGS = 5
_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Steepens singular values towards one in few steps; they end between .7 and 1.2."""


@dataclass(frozen=True, slots=True)
class LearningRates:
    """How far one step goes."""

    matrices: float
    gains: float
    decay: float
    average: float
    """Share of the old average that is kept."""


def start_state(weights: Arrays) -> Arrays:
    state: Arrays = {f"average.{name}": weight for name, weight in weights.items()}
    for name, weight in weights.items():
        state[f"momentum.{name}"] = mx.zeros_like(weight)
        if weight.ndim == 1:
            state[f"square.{name}"] = mx.zeros_like(weight)
    return state


def apply(
    weights: Arrays, gradients: Arrays, state: Arrays, *, step: int, rates: LearningRates
) -> tuple[Arrays, Arrays]:
    """New weights and new state after step number `step`, from 1."""
    fresh: Arrays = {}
    moved: Arrays = {}
    keep = min(rates.average, (step - 1) / (step + 9))
    for name, weight in weights.items():
        update = _matrix_update if weight.ndim == 2 else _gain_update
        moved[name] = update(name, weight, gradients[name], state, fresh, step=step, rates=rates)
        fresh[f"average.{name}"] = keep * state[f"average.{name}"] + (1 - keep) * moved[name]
    return moved, fresh


def average_of(state: Arrays) -> Arrays:
    """The averaged weights: what is validated and shipped."""
    return {name.removeprefix("average."): value for name, value in state.items() if name.startswith("average.")}


def orthogonal(matrix: mx.array) -> mx.array:
    """The nearest matrix with singular values of about one, by Newton-Schulz steps."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x: mx.array = matrix.T if is_tall else matrix
    x = x / (mx.linalg.norm(x) + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(_SQUARINGS):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if is_tall else x


def _matrix_update(
    name: str, weight: mx.array, gradient: mx.array, state: Arrays, fresh: Arrays, *, step: int, rates: LearningRates
) -> mx.array:
    momentum = _MOMENTUM * state[f"momentum.{name}"] + gradient
    fresh[f"momentum.{name}"] = momentum
    direction = orthogonal(gradient + _MOMENTUM * momentum)
    scale = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
    moved: mx.array = weight * (1 - rates.matrices * rates.decay) - rates.matrices * scale * direction
    return moved


def _gain_update(
    name: str, weight: mx.array, gradient: mx.array, state: Arrays, fresh: Arrays, *, step: int, rates: LearningRates
) -> mx.array:
    first, second = _BETAS
    mean = first * state[f"momentum.{name}"] + (1 - first) * gradient
    square = second * state[f"square.{name}"] + (1 - second) * gradient * gradient
    fresh[f"momentum.{name}"], fresh[f"square.{name}"] = mean, square
    mean, square = mean / (1 - first**step), square / (1 - second**step)
    return weight - rates.gains * mean / (mx.sqrt(square) + _EPSILON)
