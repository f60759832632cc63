"""Runs one batch from its file to its files: validate, answer every line, deliver. Resumes wherever another stopped.

I/O only: it never imports MLX. What is finished is in the batch's parts, what is in flight is in the queue under ids
that follow from batch and line; so a runner may die at any moment, and the next one runs no finished line again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

import msgspec

from api.batch.file_store import content_path
from api.batch.lease import BatchLease, Halt, LeaseLostError
from api.batch.lines import LineRules, Verdict, check_file
from api.batch.parts import KINDS, Kind, LineCounts, Parts
from api.batch.progress import BatchProgress, Tools
from api.fleet.catalog import find
from api.openai.batch_schemas import BatchError, Endpoint
from broker.batches import BatchRecord, BatchStatus, FileRecord
from broker.errors import BrokerUnavailableError

logger = logging.getLogger(__name__)

PAUSE_S = 0.5
T = TypeVar("T")
RunEnd = Literal["over", "stopped", "lost"]


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Bounds of every batch."""

    in_flight: int = 128
    """Lines submitted and not yet written down."""
    lease_s: float = 30.0
    most_lines: int = 50_000
    most_line_bytes: int = 10 * 1024 * 1024


class BatchRunner:
    """One batch, once."""

    def __init__(self, record: BatchRecord, tools: Tools, limits: RunnerLimits, *, runner: str) -> None:
        self._record = record
        self._tools = tools
        self._limits = limits
        self._lease = BatchLease(tools.desk, record.id, runner, lease_s=limits.lease_s)
        self._parts = Parts(tools.store, record.id, runner)
        self._progress: BatchProgress | None = None
        self._lines = record.total
        """Lines of a file that is right; 0 before that is known."""

    def stop(self) -> None:
        """Stop soon; requests in flight go on in the queue for the next runner."""
        self._lease.halt("stopping")

    async def run(self) -> RunEnd:
        """Until the batch is over, or somebody else's, or `stop` was called."""
        if not await self._take():
            return "stopped" if self._lease.why == "stopping" else "lost"
        beating = asyncio.create_task(self._lease.beat_for_ever(self._fields), name="batch-beats")
        try:
            return await self._run()
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            await self._lease.leave()

    async def _take(self) -> bool:
        """Wait for the batch until one lease has passed."""
        for _ in range(2 + round(self._limits.lease_s / PAUSE_S)):
            if await self._through_outages(lambda: self._lease.beat({})):
                return True
            if self._lease.why is not None:
                return False
            await asyncio.sleep(PAUSE_S)
        return False

    async def _run(self) -> RunEnd:
        status: str = self._record.status
        if status == "validating" or (status == "cancelling" and not self._lines):
            status = await self._validate()
        if status in ("in_progress", "cancelling"):
            status = await self._answer()
        match status:
            case "finalizing":
                return await self._deliver("completed", come_from="finalizing")
            case "cancelling":
                return await self._deliver("cancelled", come_from="cancelling")
            case "expired":
                return await self._deliver("expired", come_from="in_progress")
            case "stopped" | "lost":
                return cast("RunEnd", status)
        return "over"

    async def _validate(self) -> str:
        rules = self._rules()
        try:
            verdict = await asyncio.to_thread(self._check, rules)
        except FileNotFoundError:
            verdict = Verdict(errors=[BatchError("file_not_found", "The input file does not exist any more.")])
        if (halt := self._lease.why) is not None:
            self._lines = 0 if verdict.errors else verdict.total
            return _status_after(halt)
        model = await self._check_models(verdict)
        if verdict.errors:
            shown = msgspec.json.encode(verdict.errors).decode()
            return await self._move("failed", come_from="validating", fields={"errors": shown})
        self._lines = verdict.total
        fields: dict[str, str | int] = {"total": verdict.total} | ({"model": model} if model else {})
        return await self._move("in_progress", come_from="validating", fields=fields)

    def _check(self, rules: LineRules) -> Verdict:
        with self._tools.store.open(content_path(self._record.input_file_id)) as file:
            return check_file(file, rules, goes_on=lambda: self._lease.why not in ("stopping", "lost"))

    async def _check_models(self, verdict: Verdict) -> str:
        """Add an error for each model that nobody ever served; returns the model if there is but one."""
        fleet = await self._through_outages(lambda: self._tools.text.catalog.fleet(is_fresh=True))
        for name, line in verdict.models.items():
            if find(fleet, name) is None:
                message = f"The model {name!r} does not exist; GET /v1/models lists those that do."
                verdict.add(BatchError("model_not_found", message, line, "body.model"))
        return next(iter(verdict.models)) if len(verdict.models) == 1 else ""

    async def _answer(self) -> str:
        """Answer all lines, or those that come before an end; the status this leads to, or how the run ended."""
        fresh = await self._through_outages(lambda: self._tools.desk.batch(self._record.id))
        self._record = fresh or self._record
        if not self._lines:
            return self._record.status  # cancelled, and its file is no batch's: no line can be answered for
        tally = await asyncio.to_thread(self._parts.tally)
        self._progress = BatchProgress(self._record, self._tools, self._parts, tally, self._lease)
        try:
            if self._lease.why != "cancelled":
                await self._progress.run(self._rules(), in_flight=self._limits.in_flight)
            if self._lease.why in ("cancelled", "expired"):
                await self._progress.give_up(self._rules())
        except LeaseLostError:
            logger.info("batch %s: results are left to the next runner", self._record.id)
        halt = self._lease.why
        if halt is None:
            return await self._move("finalizing", come_from="in_progress")
        return _status_after(halt)

    async def _deliver(self, to: BatchStatus, *, come_from: BatchStatus) -> RunEnd:
        """Make the files out of the parts, and end the batch."""
        files: dict[str, str | int] = {"total": self._lines} if to == "cancelled" else {}
        tally = LineCounts()
        for kind in KINDS:
            if file_id := await self._publish(kind, tally):
                files[f"{kind}_file_id"] = file_id
        status = await self._move(to, come_from=come_from, fields=tally.fields | files | {"waits_for": ""})
        if status != to:
            return "lost"
        await asyncio.to_thread(self._parts.delete)
        logger.info("batch %s: %s", self._record.id, to)
        return "over"

    async def _publish(self, kind: Kind, tally: LineCounts) -> str:
        """The id of the output or error file, empty when there is nothing to be in it.

        The id follows from the batch, so that doing this twice leaves one file.
        """
        file_id = f"file-{self._record.id.partition('-')[2]}-{kind}"
        size = await asyncio.to_thread(self._join, kind, tally, file_id)
        if size == 0:
            return ""
        now_s = await self._through_outages(self._tools.desk.now_ms) // 1000
        record = FileRecord(
            id=file_id,
            key_id=self._record.key_id,
            bytes=size,
            created_s=now_s,
            expires_s=now_s + self._record.output_keep_s,
            filename=f"{self._record.id}_{kind}.jsonl",
            purpose="batch_output",
        )
        await self._through_outages(lambda: self._tools.desk.put_file(record))
        return file_id

    def _join(self, kind: Kind, tally: LineCounts, file_id: str) -> int:
        with self._tools.store.create(content_path(file_id)) as file:
            size = self._parts.join(kind, tally, file)
        if size == 0:
            self._tools.store.delete(content_path(file_id))
        return size

    async def _move(
        self, to: BatchStatus, *, come_from: BatchStatus, fields: Mapping[str, str | int] | None = None
    ) -> str:
        """The status the batch has then; another one than `to` where somebody else was faster."""
        return await self._through_outages(
            lambda: self._tools.desk.move(
                self._record.id, to, come_from=(come_from,), runner=self._lease.runner, fields=fields
            )
        )

    async def _through_outages(self, work: Callable[[], Awaitable[T]]) -> T:
        """Ask until Redis answers. Raises: BrokerUnavailableError when the runner is told to stop meanwhile."""
        while True:
            try:
                return await work()
            except BrokerUnavailableError:
                if self._lease.why in ("stopping", "lost"):
                    raise
            await asyncio.sleep(PAUSE_S)

    def _fields(self) -> Mapping[str, str | int]:
        return {} if self._progress is None else self._progress.fields

    def _rules(self) -> LineRules:
        endpoint = cast("Endpoint", self._record.endpoint)
        return LineRules(endpoint, self._limits.most_lines, self._limits.most_line_bytes)


def _status_after(halt: Halt) -> str:
    return {"cancelled": "cancelling", "stopping": "stopped"}.get(halt, halt)
