"""Statistics of paired measurements: the median of the pairs' ratios and its bootstrap interval."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import click
import numpy as np

RESAMPLES = 2000


class Ratio(NamedTuple):
    """A ratio over paired rounds."""

    median: float
    low: float
    high: float
    """2.5 % and 97.5 % points of the bootstrapped median."""

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired_ratio(tested: Sequence[float], reference: Sequence[float]) -> Ratio:
    """The ratio tested / reference, pair by pair.

    Args:
        tested: one figure per round.
        reference: the figure of the same round for what it is held against.
    """
    ratios = np.asarray(tested, dtype=np.float64) / np.asarray(reference, dtype=np.float64)
    draws = np.random.default_rng(0).choice(ratios, size=(RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high))


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def report(lines: Sequence[str], result: Mapping[str, Any], *, as_json: bool) -> None:
    """Print lines for a person and, with `as_json`, one JSON object as the last line."""
    for line in lines:
        click.echo(line)
    if as_json:
        click.echo(json.dumps(result))
