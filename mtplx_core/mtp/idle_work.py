"""Work for the time in which a lane has no rows, in steps so short that a row that comes waits for one at most."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator

logger = logging.getLogger(__name__)

QUIET_S = 30.0
"""How long a lane must have had no rows before such work begins: a client that calls again at once is not disturbed."""
_TRIES = 8
"""Beginnings of work that rows interrupt; then it is left to the next start."""


class IdleWork:
    """Work that is begun after a while without rows, one step at a call, and begun anew if a row comes in between.

    Args:
        begin: the work, which stops behind every step; what MLX or a full disk raises ends it.
        is_due: whether there is any.
        clock: in seconds.
    """

    def __init__(
        self,
        begin: Callable[[], Generator[None, None, None]],
        *,
        is_due: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._begin = begin
        self._is_due = is_due
        self._clock = clock
        self._quiet_since = clock()
        self._tries = 0
        self._steps: Generator[None, None, None] | None = None

    def step(self) -> bool:
        """Do one step if it is time; returns whether anything is left to do, now or later."""
        if self._steps is None and (self._tries == _TRIES or not self._is_due()):
            return False
        if self._clock() < self._quiet_since + QUIET_S:
            return True
        if self._steps is None:
            self._steps = self._begin()
            self._tries += 1
        try:
            next(self._steps)
        except StopIteration:
            self._steps, self._tries = None, 0
        except (OSError, RuntimeError):
            logger.warning("work of an idle lane failed and is not tried again", exc_info=True)
            self._steps, self._tries = None, _TRIES
        return True

    def interrupt(self) -> None:
        """Let go of what is under way: a row has come, or has gone just now."""
        self._quiet_since = self._clock()
        if self._steps is not None:
            self._steps.close()
            self._steps = None


def no_idle_work() -> IdleWork:
    """Work that is never due."""
    return IdleWork(_nothing, is_due=lambda: False, clock=lambda: 0.0)


def _nothing() -> Generator[None, None, None]:
    yield from ()
