"""What every engine keeps of a row and the bounds it has: whether it may join, what it has, when it ends. No MLX."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from mtplx_core.engine import Geometry, Row, RowEnd, RowStats
from mtplx_core.errors import RowRejectedError

EndReason = Literal["stop", "length"]


@dataclass(slots=True)
class RowProgress:
    """A row in an engine: its completion so far and what it went through."""

    row: Row
    tokens: list[int]
    cycles: int = 0
    min_width: int = 0
    max_width: int = 0

    @classmethod
    def of(cls, row: Row) -> Self:
        return cls(row, list(row.committed))

    @property
    def sequence(self) -> tuple[int, ...]:
        """All tokens the model has to have seen before the next one is chosen."""
        return (*self.row.prompt, *self.tokens)

    @property
    def stats(self) -> RowStats:
        return RowStats(cycles=self.cycles, min_width=self.min_width, max_width=self.max_width)

    def count_cycle(self, *, width: int) -> None:
        """One more cycle, decoded beside `width - 1` others."""
        self.min_width = min(self.min_width, width) if self.cycles else width
        self.max_width = max(self.max_width, width)
        self.cycles += 1

    def end(self, *, eos_token_ids: Collection[int]) -> RowEnd | None:
        """The row's end, if it has come."""
        reason = row_end(self.row, self.tokens, eos_token_ids=eos_token_ids)
        return RowEnd(self.row.row_id, reason, stats=self.stats) if reason else None

    def fail(self, message: str) -> RowEnd:
        return RowEnd(self.row.row_id, "error", message, self.stats)


def check_row(row: Row, *, geometry: Geometry, vocab_size: int, active: Collection[str]) -> None:
    """Refuse a row that the lane cannot take.

    Raises:
        RowRejectedError: which bound it breaks.
    """
    if row.row_id in active:
        raise RowRejectedError(f"row {row.row_id} is already active")
    if len(active) >= geometry.decode_batch_max:
        raise RowRejectedError(f"all {geometry.decode_batch_max} rows are taken")
    if not row.prompt:
        raise RowRejectedError("the prompt is empty")
    if row.max_tokens < 1:
        raise RowRejectedError(f"max_tokens is {row.max_tokens}, at least 1 is needed")
    if len(row.committed) > row.max_tokens:
        raise RowRejectedError(f"{len(row.committed)} tokens are committed, more than max_tokens {row.max_tokens}")
    length = len(row.prompt) + row.max_tokens
    if length > geometry.max_context_tokens:
        raise RowRejectedError(
            f"prompt and completion take {length} tokens, the lane holds {geometry.max_context_tokens}"
        )
    _check_ids(row, vocab_size)


def row_end(row: Row, tokens: Sequence[int], *, eos_token_ids: Collection[int]) -> EndReason | None:
    """How a row whose completion is `tokens` so far has ended; None while it goes on."""
    if tokens:
        last = tokens[-1]
        if last in row.stop_token_ids or (last in eos_token_ids and not row.ignore_eos):
            return "stop"
    return "length" if len(tokens) >= row.max_tokens else None


def _check_ids(row: Row, vocab_size: int) -> None:
    biased = [token for token, _ in row.sampling.logit_bias]
    for what, ids in (("prompt", row.prompt), ("committed", row.committed), ("logit_bias", biased)):
        if ids and (min(ids) < 0 or max(ids) >= vocab_size):
            raise RowRejectedError(f"{what} holds a token id outside 0..{vocab_size - 1}")
