"""Between the engine and Redis: every step's tokens become one COMMIT, every end one FINISH.

Runs beside the engine: while a COMMIT travels the next step is decoded, and what comes meanwhile goes with the next
COMMIT. Nothing is given up when Redis is away; the engine runs ahead within its bound.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from broker.errors import BrokerUnavailableError
from broker.scripts import Scripts
from mtplx_core.engine import Row, StepResult
from workers.live_row import LiveRow
from workers.row_table import Batch, RowTable

logger = logging.getLogger(__name__)


FINISHES_AT_ONCE = 16
"""Each takes a connection of its own."""


class Decoder(Protocol):
    """What the committer asks of the engine's service."""

    def submit(self, row: Row) -> None: ...

    def discard(self, row_id: str) -> None: ...

    def acknowledge(self, steps: int) -> None: ...


class Committer:
    """Owns the rows of one worker. `step` must not run twice at once."""

    def __init__(self, scripts: Scripts, *, clock: Callable[[], float]) -> None:
        self.rows = RowTable()
        self.tokens_committed = 0
        self.commits = 0
        self._scripts = scripts
        self._clock = clock
        self._decoder: Decoder | None = None
        self._width = 0
        self._worker_id = ""
        self._steps = 0
        """Steps taken in and not yet acknowledged."""
        self._wanted = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()

    def begin(self, worker_id: str, decoder: Decoder, *, width: int) -> None:
        """Commit for this worker id from now on, and keep at most `width` rows in the engine."""
        self._worker_id, self._decoder, self._width = worker_id, decoder, width

    def seat(self, row: LiveRow) -> None:
        """Take a row; the engine gets it as soon as it has a place."""
        self.rows.add(row)
        self._emptied.clear()
        if not row.is_running:
            self._wanted.set()
        self._fill()

    def drop_all(self) -> None:
        """Forget every row: they belong to another worker now, or are handed back."""
        self._discard(self.rows.clear())
        self._note_emptiness()

    def wake(self) -> None:
        """Ask for a COMMIT although no step has returned, to learn of cancellations early."""
        if len(self.rows):
            self._wanted.set()

    async def wait_until_wanted(self) -> None:
        await self._wanted.wait()

    async def wait_until_empty(self) -> None:
        """Wait until every row has ended in Redis."""
        await self._emptied.wait()

    def on_step(self, result: StepResult) -> None:
        self._steps += 1
        self._discard(self.rows.take_step(result))
        self._fill()
        self._wanted.set()

    def on_reject(self, row_id: str, message: str) -> None:
        self.rows.reject(row_id, message)
        self._fill()
        self._wanted.set()

    async def step(self) -> None:
        """COMMIT what is new and FINISH what has ended.

        Raises:
            BrokerUnavailableError: Redis is away; the next call goes on from here.
        """
        self._wanted.clear()
        steps, self._steps = self._steps, 0
        try:
            await self._commit()
        except BrokerUnavailableError:
            self._steps += steps
            self._wanted.set()
            raise
        if self._decoder is not None:
            self._decoder.acknowledge(steps)
        await self._finish()

    async def _commit(self) -> None:
        """Until nothing is refused: a refusal writes nothing, takes its row out or back, and the rest goes again."""
        while (batch := self.rows.gather(self._clock())).rows:
            result = await self._scripts.commit(self._worker_id, batch.commits, batch.messages)
            self._discard(self.rows.take_commit(batch, result))
            self._note_emptiness()
            if not result.refused:
                self._count(batch)
                return
            for refusal in result.refused:
                logger.warning("row refused as %s at length %d", refusal.why, refusal.length,
                               extra={"request_id": refusal.request_id, "worker": self._worker_id})  # fmt: skip

    async def _finish(self) -> None:
        rows = self.rows.ended()[:FINISHES_AT_ONCE]
        calls = [self._scripts.finish(self._worker_id, row.finish) for row in rows if row.finish is not None]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for row, result in zip(rows, results, strict=True):
            if not isinstance(result, BaseException) and row in self.rows:
                self.rows.take_finish(row, result)
        self._note_emptiness()
        if self.rows.ended() or any(row in self.rows for row in rows):
            self._wanted.set()
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _discard(self, rows: Iterable[LiveRow]) -> None:
        for row in rows:
            if row.is_submitted and self._decoder is not None:
                self._decoder.discard(row.id)
        self._fill()

    def _fill(self) -> None:
        """Give the engine the rows that wait for a place. Its queue keeps order, so discards come first."""
        if self._decoder is None:
            return
        for row in self.rows.waiting(self._width - self.rows.decoding):
            row.is_submitted = True
            self._decoder.submit(row.engine_row())

    def _note_emptiness(self) -> None:
        if len(self.rows):
            self._emptied.clear()
        else:
            self._emptied.set()

    def _count(self, batch: Batch) -> None:
        self.commits += 1
        self.tokens_committed += sum(len(commit.tokens) for commit in batch.commits) // 4
