"""The middle of a batch's run: a bounded number of lines in flight, and each result written down as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

from api.batch.file_store import FileStore, content_path
from api.batch.lease import BatchLease, LeaseLostError
from api.batch.line_call import LineCall, cancelled_result, expired_result
from api.batch.lines import BatchLine, LineRules, parse_line
from api.batch.parts import LineCounts, Parts, Result
from api.bulk.lines import read_lines
from api.calls.client import TextClient
from api.calls.retrying import Patience
from api.fleet.catalog import find, serving
from api.openai.batch_schemas import Endpoint
from broker.batches import BatchDesk, BatchRecord
from broker.errors import BrokerUnavailableError
from broker.wire import Cause

logger = logging.getLogger(__name__)

LINES_READ = 64
WATCH_S = 2.0
PART_RESULTS = 512
PART_BYTES = 4 << 20
FIRST_INTERVAL_S, LONGEST_INTERVAL_S = 0.5, 60.0
INTERVAL_SHARE = 0.01
"""Results wait this part of the run's time at most for company; so a long run does not leave a part per result."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What a runner works with."""

    text: TextClient
    desk: BatchDesk
    store: FileStore


class BatchProgress:
    """All lines of one batch that `tally` does not have yet."""

    def __init__(self, record: BatchRecord, tools: Tools, parts: Parts, tally: LineCounts, lease: BatchLease) -> None:
        self._record = record
        self._tools = tools
        self._parts = parts
        self._tally = tally
        self._lease = lease
        self._results: asyncio.Queue[Result | None] = asyncio.Queue()
        self._calls: dict[int, LineCall] = {}
        self._waits_for = self._unserved = ""
        self._patience = Patience(
            key_id=record.key_id,
            remaining_s=lease.remaining_s,
            may_submit=lease.be_sure,
            on_wait=self._note_wait,
        )
        self._began_s = self._wrote_s = time.monotonic()

    @property
    def fields(self) -> Mapping[str, str | int]:
        """For the batch's record: what is written down, and what the rest waits for."""
        return self._tally.fields | {"waits_for": self._waits_for or self._unserved}

    async def run(self, rules: LineRules, *, in_flight: int) -> None:
        """Until every line is answered or the lease halts. Raises: LeaseLostError when results are left unwritten."""
        room = asyncio.Semaphore(in_flight + PART_RESULTS)
        feeder = asyncio.create_task(self._feed(rules, room, asyncio.Semaphore(in_flight)), name="batch-feeder")
        writer = asyncio.create_task(self._write_for_ever(room), name="batch-writer")
        halted = asyncio.create_task(self._lease.halted.wait(), name="batch-halted")
        watch = asyncio.create_task(self._watch_for_workers(), name="batch-watch")
        try:
            await asyncio.wait({feeder, writer, halted}, return_when=asyncio.FIRST_COMPLETED)
            await self._wind_down(feeder, writer)
        finally:
            for task in (feeder, writer, halted, watch):
                task.cancel()
            await asyncio.gather(feeder, writer, halted, watch, return_exceptions=True)

    async def give_up(self, rules: LineRules) -> None:
        """Write an error for every line without an answer: the window has closed, or the batch is cancelled.

        Raises:
            LeaseLostError: the batch is another runner's.
        """
        result_of = cancelled_result if self._lease.why == "cancelled" else expired_result
        results: list[Result] = []
        async for lines in self._unanswered(rules):
            results += [result_of(self._record.id, line) for line in lines]
            if len(results) >= PART_RESULTS:
                await self._write(results)
                results = []
        if results:
            await self._write(results)

    async def _wind_down(self, feeder: asyncio.Task[None], writer: asyncio.Task[None]) -> None:
        why = self._lease.why
        if why in ("cancelled", "expired"):
            cause: Cause = "operator" if why == "cancelled" else "deadline"
            with contextlib.suppress(BrokerUnavailableError):
                for call in list(self._calls.values()):
                    await call.cancel(cause)
        if not feeder.done():
            feeder.cancel()
            await asyncio.gather(feeder, return_exceptions=True)
        if why != "lost" and not writer.done():
            self._results.put_nowait(None)
            await asyncio.wait({writer})
        for task in (feeder, writer):
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _feed(self, rules: LineRules, room: asyncio.Semaphore, slots: asyncio.Semaphore) -> None:
        async with contextlib.aclosing(self._unanswered(rules)) as unanswered, asyncio.TaskGroup() as group:
            async for lines in unanswered:
                for line in lines:
                    await room.acquire()
                    await slots.acquire()
                    group.create_task(self._answer(line, slots), name="batch-line")

    async def _answer(self, line: BatchLine, slots: asyncio.Semaphore) -> None:
        endpoint = cast("Endpoint", self._record.endpoint)
        call = LineCall(self._tools.text, self._patience, endpoint, self._record.id, line)
        self._calls[line.number] = call
        try:
            with contextlib.suppress(LeaseLostError):  # whoever has the batch next asks for this line
                self._results.put_nowait(await call.run())
            if call.is_expired:  # the lines may all have ended before a beat tells that the window has closed
                self._lease.halt("expired")
        finally:
            del self._calls[line.number]
            slots.release()

    def _note_wait(self, what: str) -> None:
        if what and what != self._waits_for:
            logger.info("batch %s waits: %s", self._record.id, what)
        self._waits_for = what

    async def _watch_for_workers(self) -> None:
        """Notice when nobody serves the model: its lines then wait in the queue without a word."""
        catalog, model = self._tools.text.catalog, self._record.model
        while model is not None:
            with contextlib.suppress(BrokerUnavailableError):
                fleet = await catalog.fleet()
                card = find(fleet, model)
                is_served = card is None or bool(serving(fleet, card))
                self._unserved = "" if is_served else f"No worker serves {model!r} at the moment."
            await asyncio.sleep(WATCH_S)

    async def _unanswered(self, rules: LineRules) -> AsyncGenerator[Sequence[BatchLine], None]:
        """Lines without an answer, a few at a time."""
        with await asyncio.to_thread(self._tools.store.open, content_path(self._record.input_file_id)) as file:
            raws = read_lines(file, most_line_bytes=rules.most_line_bytes)
            while some := await asyncio.to_thread(lambda: list(islice(raws, LINES_READ))):
                # Validation has seen every one of them, so none of them fails here.
                yield [parse_line(raw, rules) for raw in some if not self._tally.has(raw.number)]

    async def _write_for_ever(self, room: asyncio.Semaphore) -> None:
        is_last = False
        while not is_last:
            results, is_last = await self._gather()
            if results:
                await self._write(results)
            for _ in results:
                room.release()

    async def _gather(self) -> tuple[list[Result], bool]:
        """Results for one part, and whether they are the last."""
        results: list[Result] = []
        size = 0
        try:
            while len(results) < PART_RESULTS and size < PART_BYTES:
                timeout_s = self._due_in_s() if results else None
                async with asyncio.timeout(timeout_s):
                    result = await self._results.get()
                if result is None:
                    return results, True
                results.append(result)
                size += len(result.data)
        except TimeoutError:
            pass
        return results, False

    def _due_in_s(self) -> float:
        now_s = time.monotonic()
        interval_s = min(max(FIRST_INTERVAL_S, (now_s - self._began_s) * INTERVAL_SHARE), LONGEST_INTERVAL_S)
        return max(0.0, self._wrote_s + interval_s - now_s)

    async def _write(self, results: Sequence[Result]) -> None:
        """Raises: LeaseLostError."""
        await self._lease.be_sure()  # else these may be answers that another runner has taken and given up
        await asyncio.to_thread(self._parts.write, results)
        self._wrote_s = time.monotonic()
        for result in results:
            self._tally.add(
                result.number, result.kind, input_tokens=result.input_tokens, output_tokens=result.output_tokens
            )
        with contextlib.suppress(BrokerUnavailableError):  # then they go when their time is over
            await self._tools.desk.forget([request_id for result in results for request_id in result.request_ids])
