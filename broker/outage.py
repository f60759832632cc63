"""Tells a Redis that has fallen silent from one that is slow, and ends what waits for it. Has no clock of its own.

A frozen server breaks no connection: without this, whoever asks it waits for a socket time-out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from broker.errors import BrokerUnavailableError

SILENT_S = 0.6
"""Longer than a server that works takes for an answer, and short enough for a refusal within a second."""
TICK_S = 0.05
LATE_TICKS = 2
"""What one tick counts for at most: while this process itself stood still, nobody was silent."""


class OutageWatch:
    """Counts for how long a question has been open and nothing at all was heard."""

    def __init__(self, silent_s: float = SILENT_S) -> None:
        self._silent_s = silent_s
        self._counted_s = 0.0
        self._open_questions = 0
        self._asked = asyncio.Event()
        self._guards: set[asyncio.Timeout] = set()

    @property
    def is_silent(self) -> bool:
        return self._counted_s >= self._silent_s

    def heard(self) -> None:
        """Redis has said something."""
        self._counted_s = 0.0

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Around a question whose answer proves that Redis is there."""
        self._open_questions += 1
        self._asked.set()
        try:
            yield
            self.heard()
        finally:
            self._open_questions -= 1
            if not self._open_questions:
                self._asked.clear()

    async def wait_for_question(self) -> None:
        """Return once a question is open: before that there is nothing to count."""
        await self._asked.wait()

    def tick(self, elapsed_s: float) -> None:
        """So much time has passed since the last tick."""
        if not self._open_questions:
            return
        self._counted_s += min(elapsed_s, LATE_TICKS * TICK_S)
        if self.is_silent:
            self._end_all()

    @contextlib.asynccontextmanager
    async def guard(self) -> AsyncIterator[None]:
        """Whatever waits for Redis in here is ended when Redis falls silent.

        Raises:
            BrokerUnavailableError: it has, before or meanwhile.
        """
        if self.is_silent:
            raise BrokerUnavailableError("Redis does not answer")
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._guards.add(limit)
                try:
                    yield
                finally:
                    self._guards.discard(limit)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise BrokerUnavailableError("Redis does not answer") from error

    def _end_all(self) -> None:
        for limit in self._guards:
            limit.reschedule(asyncio.get_running_loop().time())
        self._guards.clear()
