"""Tells a step that never returns from a thread that has nothing to do, or waits for Redis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from workers.errors import StalledError


class Progressing(Protocol):
    @property
    def progress(self) -> int: ...

    @property
    def is_waiting(self) -> bool: ...


class StallWatch:
    """Looks at the engine's progress now and then."""

    def __init__(self, stall_s: float, *, late_s: float, clock: Callable[[], float]) -> None:
        self._stall_s = stall_s
        self._late_s = late_s
        self._clock = clock
        self._progress = -1
        self._since_s = self._looked_s = clock()

    def check(self, engine: Progressing, *, active: int) -> None:
        """Look once.

        Raises:
            StalledError: rows are active and nothing has moved for `stall_s`.
        """
        now_s = self._clock()
        # Looking late means that this process stood still as a whole, and the engine with it.
        was_late = now_s - self._looked_s > self._late_s
        self._looked_s = now_s
        if engine.progress != self._progress or not active or engine.is_waiting or was_late:
            self._progress, self._since_s = engine.progress, now_s
        elif now_s - self._since_s >= self._stall_s:
            raise StalledError(f"{active} rows are active and no step has returned for {self._stall_s:g} s")
