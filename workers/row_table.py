"""The rows of this worker, and what a step, a commit or its refusal changes about them. Pure: no I/O, no clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from broker.scripts import CommitResult, FinishResult, Refusal, RowCommit
from broker.wire import Event, encode_events
from mtplx_core.engine import RowEnd, StepResult
from workers.running_row import ActiveRow

PROGRESS_EVERY_S = 0.5


class CommitBatch(NamedTuple):
    """One COMMIT: every row that goes on or has tokens to add."""

    rows: tuple[ActiveRow, ...]
    commits: tuple[RowCommit, ...]
    messages: Mapping[str, bytes]
    """Encoded events by reply channel."""


class RowTable:
    """Rows by their name in the engine. Methods that end rows return those the engine must discard."""

    def __init__(self, on_leave: Callable[[ActiveRow, str], None] = lambda row, how: None) -> None:
        """`on_leave` is told of every row that leaves, and how it ended."""
        self._rows: dict[str, ActiveRow] = {}
        self._on_leave = on_leave

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[ActiveRow]:
        return iter(list(self._rows.values()))

    def __contains__(self, row: ActiveRow) -> bool:
        return self._rows.get(row.id) is row

    @property
    def decoding(self) -> int:
        """Rows that take a place in the engine."""
        return sum(row.is_decoding for row in self._rows.values())

    @property
    def paused(self) -> int:
        return sum(row.is_running and row.is_paused for row in self._rows.values())

    def has_seat(self, request_id: str, attempt: int) -> bool:
        return f"{request_id}:{attempt}" in self._rows

    def add(self, row: ActiveRow) -> None:
        self._rows[row.id] = row

    def remove(self, row: ActiveRow, how: str) -> None:
        if self._rows.pop(row.id, None) is not None:
            self._on_leave(row, how)

    def clear(self, how: str) -> list[ActiveRow]:
        """Forget everything; returns what the engine still has."""
        held = [row for row in self._rows.values() if row.is_submitted and row.is_running]
        for row in self:
            self.remove(row, how)
        return held

    def take_step(self, result: StepResult) -> list[ActiveRow]:
        """Take in what a step brought."""
        stopped = []
        for new in result.tokens:
            row = self._rows.get(new.row_id)
            if row is not None and row.is_running and row.take(new):
                stopped.append(row)
        for progress in result.prefill:
            if row := self._rows.get(progress.row_id):
                row.progress = progress
        for end in result.ends:
            self._take_end(end, stopped)
        return stopped

    def reject(self, row_id: str, message: str) -> None:
        """The engine will not take a row."""
        if row := self._rows.get(row_id):
            row.fail("row_rejected", message)

    def gather(self, now_s: float) -> CommitBatch:
        """What COMMIT has to say now."""
        rows = tuple(row for row in self._rows.values() if row.is_running or row.has_uncommitted)
        commits = tuple(row.commit() for row in rows)
        events: dict[str, list[Event]] = defaultdict(list)
        for row, commit in zip(rows, commits, strict=True):
            if row.reply:
                told = (row.tell_progress(now_s, every_s=PROGRESS_EVERY_S), row.news(commit))
                events[row.reply] += [event for event in told if event is not None]
        return CommitBatch(rows, commits, {channel: encode_events(told) for channel, told in events.items() if told})

    def take_commit(self, batch: CommitBatch, result: CommitResult) -> list[ActiveRow]:
        """Take in the answer to a COMMIT. After a refusal nothing was written and `gather` brings the rest."""
        rows = {row.seat.request_id: row for row in batch.rows if row in self}
        if result.refused:
            refused = [(rows[refusal.request_id], refusal) for refusal in result.refused if refusal.request_id in rows]
            return [row for row, refusal in refused if self._take_refusal(row, refusal)]
        for row, commit in zip(batch.rows, batch.commits, strict=True):
            row.committed = max(row.committed, commit.position + len(commit.tokens) // 4)
        discarded = []
        for request_id, cause in result.wanted_ends.items():
            row_wanted = rows.get(request_id)
            if row_wanted is not None and row_wanted.is_running:
                row_wanted.cancel(cause)
                discarded.append(row_wanted)
        return discarded

    def ended(self) -> list[ActiveRow]:
        """Rows whose tokens are all committed and whose end is not."""
        return [row for row in self._rows.values() if row.finish is not None and not row.has_uncommitted]

    def take_finish(self, row: ActiveRow, result: FinishResult) -> None:
        """Take in the answer to a FINISH."""
        if result.outcome != "short":
            self.remove(row, "lost" if result.outcome == "lost" or row.finish is None else row.finish.cause)
        elif result.length < row.length:
            row.committed = result.length
        else:
            row.fail("diverged", "the token log holds tokens that this worker did not decode")

    def _take_end(self, end: RowEnd, stopped: list[ActiveRow]) -> None:
        row = self._rows.get(end.row_id)
        if row is None:
            return
        if row in stopped:
            # Found out in this very step: the engine has let the row go already, and says what it went through.
            stopped.remove(row)
            row.end("stop", end.stats)
        elif row.is_running and end.reason == "error":
            row.fail("engine_error", end.message)
        elif row.is_running:
            assert end.reason != "error"
            row.end(end.reason, end.stats)

    def _take_refusal(self, row: ActiveRow, refusal: Refusal) -> bool:
        """Whether the engine must discard the row."""
        was_running = row.is_running
        match refusal.why:
            case "lost":
                self.remove(row, "lost")
                return was_running
            case "diverged":
                row.fail("diverged", "the token log holds other tokens than this worker decoded")
                row.committed = row.length
                return was_running
            case "short":
                row.committed = refusal.length
                return False
