"""Draws a learning curve as an SVG file: held-out acceptance and training loss over steps."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 720, 400, 56, 40, 56, 44
_INK, _ACCEPTANCE, _LOSS = "#333", "#0b6e4f", "#b5651d"


class Point(NamedTuple):
    """What training looked like at one step."""

    step: int
    loss: float
    acceptance: float
    """Of the head alone on held-out greedy answers."""


def draw_curve(points: Sequence[Point], path: Path, *, title: str) -> None:
    """Write the picture; needs no drawing library."""
    path.write_text(_svg(points, title))


def _svg(points: Sequence[Point], title: str) -> str:
    steps = max((point.step for point in points), default=1)
    losses = [point.loss for point in points if point.step]
    low, high = min(losses, default=0.0), max(losses, default=1.0)
    spread = (high - low) or 1.0
    acceptance = [_at(point.step / steps, point.acceptance) for point in points]
    loss = [_at(point.step / steps, (point.loss - low) / spread) for point in points if point.step]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="{_INK}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{html.escape(title)}</text>',
        *_grid(steps, low, spread),
        _line(loss, _LOSS),
        _line(acceptance, _ACCEPTANCE),
        f'<text x="{_LEFT}" y="{_HEIGHT - 8}" fill="{_ACCEPTANCE}">left: held-out acceptance, head alone</text>',
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 8}" text-anchor="end" fill="{_LOSS}">right: training loss</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _grid(steps: int, low: float, spread: float) -> list[str]:
    parts = []
    for tenth in range(0, 11, 2):
        x, y = _at(tenth / 10, tenth / 10)
        left, right = _at(0, tenth / 10)[0], _at(1, tenth / 10)[0]
        parts += [
            f'<line x1="{left}" y1="{y}" x2="{right}" y2="{y}" stroke="#ddd"/>',
            f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{tenth / 10:.1f}</text>',
            f'<text x="{right + 6}" y="{y + 4}">{low + spread * tenth / 10:.2f}</text>',
            f'<text x="{x}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{round(steps * tenth / 10)}</text>',
        ]
    return parts


def _line(places: Sequence[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x},{y}" for x, y in places)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _at(across: float, up: float) -> tuple[float, float]:
    x = _LEFT + across * (_WIDTH - _LEFT - _RIGHT)
    y = _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)
    return round(x, 1), round(y, 1)
