"""What every engine keeps of a row and the bounds it has: whether it may join, what it has, when it ends. No MLX."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, Self, TypeVar

from mtplx_core.engine import Geometry, Row, RowCycle, RowEnd, RowStats
from mtplx_core.errors import RowRejectedError

EndReason = Literal["stop", "length"]


@dataclass(slots=True)
class RowProgress:
    """A row in an engine: its completion so far and what it went through."""

    row: Row
    tokens: list[int]
    stats: RowStats = RowStats()

    @classmethod
    def of(cls, row: Row) -> Self:
        return cls(row, list(row.committed))

    @property
    def sequence(self) -> tuple[int, ...]:
        """All tokens the model has to have seen before the next one is chosen."""
        return (*self.row.prompt, *self.tokens)

    def count_cycle(self, cycle: RowCycle) -> RowCycle:
        self.stats = self.stats.after(cycle)
        return cycle

    def end(self, *, eos_token_ids: Collection[int]) -> RowEnd | None:
        """The row's end, if it has come."""
        reason = row_end(self.row, self.tokens, eos_token_ids=eos_token_ids)
        return RowEnd(self.row.row_id, reason, stats=self.stats) if reason else None

    def fail(self, message: str) -> RowEnd:
        return RowEnd(self.row.row_id, "error", message, self.stats)


R = TypeVar("R", bound=RowProgress)


@dataclass(slots=True)
class Roster(Generic[R]):
    """The rows of an engine that keeps one object for each: those that take a place, and those that are paused."""

    geometry: Geometry
    vocab_size: int
    active: dict[str, R] = field(default_factory=dict)
    paused: dict[str, R] = field(default_factory=dict)

    @property
    def held(self) -> list[R]:
        return [*self.active.values(), *self.paused.values()]

    def check(self, row: Row) -> None:
        """Refuse a row that cannot come; see `check_row`."""
        check_row(row, geometry=self.geometry, vocab_size=self.vocab_size, active=self.active, paused=self.paused)

    def add(self, progress: R) -> None:
        self.active[progress.row.row_id] = progress

    def discard(self, row_id: str) -> R | None:
        """Forget a row, if there is one of this id."""
        return self.active.pop(row_id, None) or self.paused.pop(row_id, None)

    def pause(self, row_id: str) -> R | None:
        """The row that no longer takes a place, if it took one."""
        progress = self.active.pop(row_id, None)
        if progress is not None:
            self.paused[row_id] = progress
        return progress

    def resume(self, row_id: str) -> None:
        """Give a paused row a place again.

        Raises:
            RowRejectedError: there is none; the row stays paused.
        """
        if row_id in self.paused:
            check_place(len(self.active), geometry=self.geometry)
            self.active[row_id] = self.paused.pop(row_id)

    def clear(self) -> None:
        self.active.clear()
        self.paused.clear()


def check_place(taken: int, *, geometry: Geometry) -> None:
    """Refuse one more row beside `taken` others.

    Raises:
        RowRejectedError: there is no place.
    """
    if taken >= geometry.decode_batch_max:
        raise RowRejectedError(f"all {geometry.decode_batch_max} rows are taken")


def check_row(
    row: Row, *, geometry: Geometry, vocab_size: int, active: Collection[str], paused: Collection[str] = ()
) -> None:
    """Refuse a row that the lane cannot take.

    Args:
        active: ids of the rows that take a place.
        paused: ids of those that take none.

    Raises:
        RowRejectedError: which bound it breaks.
    """
    if row.row_id in active or row.row_id in paused:
        raise RowRejectedError(f"row {row.row_id} is already active")
    check_place(len(active), geometry=geometry)
    if not row.prompt:
        raise RowRejectedError("the prompt is empty")
    if row.max_tokens < 1:
        raise RowRejectedError(f"max_tokens is {row.max_tokens}, at least 1 is needed")
    if len(row.committed) > row.max_tokens:
        raise RowRejectedError(f"{len(row.committed)} tokens are committed, more than max_tokens {row.max_tokens}")
    if not 0 <= row.min_tokens <= row.max_tokens:
        raise RowRejectedError(f"min_tokens is {row.min_tokens}, allowed are 0 to max_tokens, {row.max_tokens}")
    length = len(row.prompt) + row.max_tokens
    if length > geometry.max_context_tokens:
        raise RowRejectedError(
            f"prompt and completion take {length} tokens, the lane holds {geometry.max_context_tokens}"
        )
    _check_ids(row, vocab_size)


def row_end(row: Row, tokens: Sequence[int], *, eos_token_ids: Collection[int]) -> EndReason | None:
    """How a row whose completion is `tokens` so far has ended; None while it goes on."""
    if tokens and tokens[-1] in end_tokens(row, eos_token_ids=eos_token_ids):
        return "stop"
    return "length" if len(tokens) >= row.max_tokens else None


def end_tokens(row: Row, *, eos_token_ids: Collection[int]) -> frozenset[int]:
    """Tokens that end the row."""
    return row.stop_token_ids if row.ignore_eos else row.stop_token_ids.union(eos_token_ids)


def with_end_tokens(row: Row, *, eos_token_ids: Collection[int]) -> Row:
    """The row with a sampling that knows the end tokens, where the row may not end yet; else the row as it is."""
    if not row.min_tokens:
        return row
    ends = tuple(sorted(end_tokens(row, eos_token_ids=eos_token_ids)))
    return replace(row, sampling=replace(row.sampling, min_tokens=row.min_tokens, end_token_ids=ends))


def _check_ids(row: Row, vocab_size: int) -> None:
    biased = [token for token, _ in row.sampling.logit_bias]
    for what, ids in (("prompt", row.prompt), ("committed", row.committed), ("logit_bias", biased)):
        if ids and (min(ids) < 0 or max(ids) >= vocab_size):
            raise RowRejectedError(f"{what} holds a token id outside 0..{vocab_size - 1}")
