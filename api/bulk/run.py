"""Answers many rows through the queue: a bounded number in flight, each answer written as it comes.

Neither reads files nor draws bars; see `api.bulk.rows`, `api.bulk.output` and the command line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from api.bulk.output import BulkOutput, OutputLine
from api.bulk.rows import BulkRow
from api.calls.client import TextClient
from api.calls.retrying import AnsweredCall, Patience, PatientCall
from api.errors import ApiError
from api.openai.schemas import Usage

HELD_PER_SLOT = 8


@dataclass(slots=True)
class BulkCounts:
    """What one run has done so far."""

    rows: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    accepted: int = 0
    """Drafted tokens that were kept."""
    rejected: int = 0
    waits_for: str = ""

    @property
    def acceptance(self) -> float | None:
        """None where nothing was drafted."""
        drafted = self.accepted + self.rejected
        return self.accepted / drafted if drafted else None

    def add(self, usage: Usage) -> None:
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens
        if isinstance(usage.completion_tokens_details, msgspec.Struct):
            self.accepted += usage.completion_tokens_details.accepted_prediction_tokens
            self.rejected += usage.completion_tokens_details.rejected_prediction_tokens


class _Choice(msgspec.Struct, frozen=True):
    finish_reason: str
    text: str = ""
    message: _Message | None = None


class _Message(msgspec.Struct, frozen=True):
    content: str


class _Body(msgspec.Struct, frozen=True):
    choices: list[_Choice]


_body = msgspec.json.Decoder(_Body)


@dataclass(slots=True)
class Bulk:
    """One run over some rows."""

    text: TextClient
    output: BulkOutput
    in_flight: int = 128
    keeps_order: bool = False
    on_progress: Callable[[BulkCounts], None] = lambda counts: None
    counts: BulkCounts = field(default_factory=BulkCounts)
    _room: asyncio.Semaphore = field(init=False)
    """Rows submitted or held: with the order kept, one slow row may hold up that many."""
    _calls: dict[int, PatientCall] = field(default_factory=dict)
    _held: dict[int, OutputLine] = field(default_factory=dict)
    _order: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._room = asyncio.Semaphore(self.in_flight * HELD_PER_SLOT)

    async def run(self, rows: Iterator[BulkRow]) -> None:
        """Answer every row that is not answered yet. Cancelled, it leaves what is in flight to `abandon`."""
        slots = asyncio.Semaphore(self.in_flight)
        async with asyncio.TaskGroup() as group:
            while (row := await asyncio.to_thread(next, rows, None)) is not None:
                if row.number in self.output.done:
                    continue
                await self._room.acquire()
                await slots.acquire()
                self._order.append(row.number)
                group.create_task(self._answer(row, slots), name="bulk-row")

    async def abandon(self) -> None:
        """Have everything in flight end; whoever goes on asks for it anew."""
        calls = list(self._calls.values())
        self.output.renew()
        await asyncio.gather(*(call.cancel("client") for call in calls))

    async def _answer(self, row: BulkRow, slots: asyncio.Semaphore) -> None:
        if row.problem:
            self._put(OutputLine(row.number, row.name, error={"message": row.problem, "code": "invalid_row"}))
            slots.release()
            return
        note = self.output.note
        call_id = f"{note.run_id}-{note.generation}-{row.number}"
        call = PatientCall(self.text, Patience(on_wait=self._note_wait), row.endpoint, row.body, call_id=call_id)
        self._calls[row.number] = call
        try:
            self._put(self._line(row, await call.run()))
        except ApiError as error:
            shown = {"message": error.message, "code": error.code, "status": error.status}
            self._put(OutputLine(row.number, row.name, error=shown))
        del self._calls[row.number]
        slots.release()

    def _line(self, row: BulkRow, answered: AnsweredCall) -> OutputLine:
        usage, reasons = answered.whole.usage, answered.whole.reasons
        if "cancelled" in reasons:
            shown = {"message": "The request was cancelled.", "code": "request_cancelled"}
            return OutputLine(row.number, row.name, error=shown)
        self.counts.add(usage)
        choices = _body.decode(answered.whole.body).choices
        texts = [choice.message.content if choice.message is not None else choice.text for choice in choices]
        is_single = len(texts) == 1
        return OutputLine(
            line=row.number,
            id=row.name,
            text=texts[0] if is_single else texts,
            finish_reason=reasons[0] if is_single else list(reasons),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
        )

    def _put(self, line: OutputLine) -> None:
        """Write a line, or hold it until it is its turn."""
        self._held[line.line] = line
        ready = [line.line] if not self.keeps_order else []
        while self.keeps_order and self._order and self._order[0] in self._held:
            ready.append(self._order.pop(0))
        for number in ready:
            done = self._held.pop(number)
            self.output.write(done)
            self._room.release()
            self.counts.rows += 1
            self.counts.failed += done.error is not None
        self.on_progress(self.counts)

    def _note_wait(self, what: str) -> None:
        if what != self.counts.waits_for:
            self.counts.waits_for = what
            self.on_progress(self.counts)
