"""What the keys that a cycle attends to add to its cost, learned from cycles over rows of different lengths.

Imports no MLX and reads no clock. It owns no costs of cycles: those are the cost table's.
"""

from __future__ import annotations

_PRIOR_WEIGHT = 2000.0**2
"""What is assumed beforehand weighs as much as one cycle over 2,000 keys more than are usual with its kind."""
_MEMORY = 1000.0
"""Sightings together weigh at most so many times as much as what was assumed, so that later ones always count."""


class KeyCost:
    """The cost of one attended key: a part of every cycle, and a part for each draft in it.

    A least-squares fit through the deviations of cycles from what is usual with their kind. Rows grow slowly and the
    machine's speed changes meanwhile, so what tells are rows that leave and join.

    Args:
        plain: assumed cost of a key in a cycle without drafts.
        per_draft: assumed further cost of it for each draft.
    """

    def __init__(self, plain: float = 0.0, per_draft: float = 0.0) -> None:
        self._assumed = (plain, per_draft)
        self._squares = (0.0, 0.0, 0.0)
        """The sums of squares of keys, of keys times keys by draft, and of keys by draft."""
        self._products = (0.0, 0.0)
        """The sums of cost times keys, and times keys by draft."""
        self._fitted = self._assumed

    def of(self, depth: int) -> float:
        """The cost of one more key in a cycle of so many drafts."""
        plain, per_draft = self._fitted
        return plain + depth * per_draft

    def see(self, depth: int, *, keys: float, cost: float) -> None:
        """Take in a cycle over `keys` more keys than are usual with its kind, that cost `cost` more."""
        by_draft = depth * keys
        first, mixed, second = self._squares
        squares = first + keys * keys, mixed + keys * by_draft, second + by_draft * by_draft
        products = self._products[0] + keys * cost, self._products[1] + by_draft * cost
        share = min(1.0, _MEMORY * _PRIOR_WEIGHT / max(squares[0], squares[2], 1.0))
        self._squares = (share * squares[0], share * squares[1], share * squares[2])
        self._products = (share * products[0], share * products[1])
        self._fitted = self._fit()

    def scale(self, factor: float) -> None:
        """Take the whole machine to be slower by a factor."""
        self._assumed = (factor * self._assumed[0], factor * self._assumed[1])
        self._products = (factor * self._products[0], factor * self._products[1])
        self._fitted = (factor * self._fitted[0], factor * self._fitted[1])

    def _fit(self) -> tuple[float, float]:
        """The parts that fit what was assumed and seen best; neither is below zero."""
        first, mixed, second = self._squares[0] + _PRIOR_WEIGHT, self._squares[1], self._squares[2] + _PRIOR_WEIGHT
        plain, per_draft = (
            seen + _PRIOR_WEIGHT * assumed for seen, assumed in zip(self._products, self._assumed, strict=True)
        )
        determinant = first * second - mixed * mixed  # above zero, since what was assumed weighs something on both
        fitted = (second * plain - mixed * per_draft) / determinant, (first * per_draft - mixed * plain) / determinant
        if fitted[1] < 0:
            return max(plain / first, 0.0), 0.0
        if fitted[0] < 0:
            return 0.0, max(per_draft / second, 0.0)
        return fitted
