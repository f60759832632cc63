"""A monotonic clock that tests move."""

from __future__ import annotations


class FakeClock:
    """Call it for the time."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
