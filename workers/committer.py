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
from broker.wire import Assignment
from mtplx_core.engine import Row, StepResult
from workers.cohort_log import CohortLedger
from workers.row_scheduler import SchedulerRules, arrange, count_held
from workers.row_table import CommitBatch, RowTable
from workers.running_row import ActiveRow

logger = logging.getLogger(__name__)


FINISHES_AT_ONCE = 16
"""Each takes a connection of its own."""


class Decoder(Protocol):
    """What the committer asks of the engine's service."""

    def submit(self, row: Row) -> None: ...

    def discard(self, row_id: str) -> None: ...

    def pause(self, row_id: str) -> None: ...

    def resume(self, row_id: str) -> None: ...

    def acknowledge(self, steps: int) -> None: ...


class Committer:
    """Owns the rows of one worker. `step` must not run twice at once."""

    def __init__(self, scripts: Scripts, *, clock: Callable[[], float]) -> None:
        self.cohorts = CohortLedger()
        self.rows = RowTable(self.cohorts.leave)
        self.tokens_committed = 0
        self.commits = 0
        self._scripts = scripts
        self._clock = clock
        self._decoder: Decoder | None = None
        self._rules = SchedulerRules()
        self._returned: list[Assignment] = []
        """Rows that gave way without memory to be paused in, to be handed back."""
        self._worker_id = ""
        self._steps = 0
        """Steps taken in and not yet acknowledged."""
        self._wanted = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()

    @property
    def held(self) -> int:
        """Offline rows that gave way not long ago and do not again for a while."""
        return count_held(self.rows, self._rules, now_s=self._clock())

    def begin(self, worker_id: str, decoder: Decoder, rules: SchedulerRules) -> None:
        """Commit for this worker id from now on, and give out the engine's places by these rules."""
        self._worker_id, self._decoder, self._rules = worker_id, decoder, rules

    def seat(self, row: ActiveRow) -> None:
        """Take a row; the engine gets it as soon as it has a place."""
        row.seated_s = self._clock()
        if row.is_offline and row.seat.attempt > 1:
            row.back_since_s = row.seated_s
        self.rows.add(row)
        self._emptied.clear()
        if not row.is_running:
            self._wanted.set()
        self._fill()

    def drop_all(self, how: str) -> None:
        """Forget every row: they belong to another worker now, or are handed back; `how` goes on record."""
        self._returned.clear()
        self._discard(self.rows.clear(how))
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
        await self._hand_back()

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

    async def _hand_back(self) -> None:
        seats = list(self._returned)
        if not seats:
            return
        try:
            await self._scripts.hand_back(self._worker_id, seats, is_crash=False)
        except BrokerUnavailableError:
            self._wanted.set()
            raise
        self._returned = [seat for seat in self._returned if seat not in seats]

    def _discard(self, rows: Iterable[ActiveRow]) -> None:
        for row in rows:
            if row.is_submitted and self._decoder is not None:
                self._decoder.discard(row.id)
        self._fill()

    def _fill(self) -> None:
        """Give out the engine's places. Its queue keeps order, so what makes room comes first."""
        if self._decoder is None:
            return
        now_s = self._clock()
        moves = arrange(self.rows, self._rules, now_s=now_s)
        for row in moves.paused:
            row.is_paused = True
            self._decoder.pause(row.id)
        for row in moves.returned:
            self.rows.remove(row, "handed_back")
            self._decoder.discard(row.id)
            self._returned.append(row.seat)
            self._wanted.set()
        for row in moves.resumed:
            row.is_paused, row.back_since_s = False, now_s
            self._decoder.resume(row.id)
        for row in moves.admitted:
            row.is_submitted = True
            self._decoder.submit(row.engine_row())

    def _note_emptiness(self) -> None:
        if len(self.rows):
            self._emptied.clear()
        else:
            self._emptied.set()

    def _count(self, batch: CommitBatch) -> None:
        self.commits += 1
        self.tokens_committed += sum(len(commit.tokens) for commit in batch.commits) // 4
