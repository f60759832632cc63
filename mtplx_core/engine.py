"""The one interface behind which every lane's engine stands, and the values that cross it.

Token ids go in, token ids come out: no text, no sockets, no clock. An engine lives on one thread; whoever owns
that thread calls `admit`, `discard` and `step` on it and nothing else touches the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Protocol


class SchedulerMode(StrEnum):
    """Which engine a lane runs on."""

    SERIAL = "serial"
    AR_BATCH = "ar_batch"
    MTP_BATCH = "mtp_batch"


class Profile(StrEnum):
    """Numerics profile: rows decoded together, or each row decoded alone."""

    BALANCED = "balanced"
    B1_EXACT = "b1-exact"


USUAL_DEPTH = 7
"""Most tokens drafted per row and cycle where nobody says: what lookup finds in repetitions is right for many."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """A lane's bounds."""

    decode_batch_max: int = 8
    """Rows decoded together."""
    max_context_tokens: int = 2048
    """Prompt plus completion of one row, in tokens."""
    depth: int = 0
    """Most tokens drafted per row and cycle; 0 for the AR engines."""
    prefill_chunk_tokens: int = 512
    """Prompt tokens of one row fed in one forward."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token of one row is chosen; the defaults are greedy decoding without penalties."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means no bound."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit) pairs."""
    seed: int = 0
    """Unsigned 64 bit; with the position in the completion and the token id it decides all noise."""
    min_tokens: int = 0
    """Position in the completion before which no token of `end_token_ids` can be chosen."""
    end_token_ids: tuple[int, ...] = ()
    """Tokens that end the row. An engine fills both in from `Row`, since it knows the model's own end tokens."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One request as the engine sees it."""

    row_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    """Completion tokens in all, counted from the start of the completion, `committed` included."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    committed: tuple[int, ...] = ()
    """Completion tokens an earlier attempt has already committed; generation goes on behind them."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the row besides the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    top_logprobs: int | None = None
    """None: no logprobs. n: the chosen token's and those of the n most likely tokens."""
    is_offline: bool = False
    """Whether its prompt is fed after those of rows that somebody waits for."""
    min_tokens: int = 0
    """Completion tokens before which no token that ends the row can be chosen, `committed` included."""


class TokenLogprob(NamedTuple):
    """Float32 log-softmax of the raw logits at one position."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), most likely first."""


class RowCycle(NamedTuple):
    """One cycle of one row."""

    width: int = 1
    """Rows it was decoded with, itself included."""
    drafted: int = 0
    accepted: int = 0
    """Drafts among the tokens it got: none of those behind the token that ends it."""


class RowTokens(NamedTuple):
    """New tokens of one row; the ending token (end of sequence, stop token) is among them."""

    row_id: str
    position: int
    """Index within the completion of the first of `tokens`."""
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    cycle: RowCycle = RowCycle()


class PrefillProgress(NamedTuple):
    row_id: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class RowStats:
    """What one row went through; zeros where the engine drafts nothing."""

    cycles: int = 0
    drafted: tuple[int, ...] = ()
    """Drafts made at depth 1, 2, ..."""
    accepted: tuple[int, ...] = ()
    """Drafts accepted at depth 1, 2, ..."""
    min_width: int = 0
    max_width: int = 0

    def after(self, cycle: RowCycle) -> RowStats:
        """The sum with one more cycle in it."""
        width = cycle.width
        return RowStats(
            cycles=self.cycles + 1,
            drafted=_counted(self.drafted, cycle.drafted, up_to=cycle.drafted),
            accepted=_counted(self.accepted, cycle.drafted, up_to=cycle.accepted),
            min_width=min(self.min_width, width) if self.cycles else width,
            max_width=max(self.max_width, width),
        )


class RowEnd(NamedTuple):
    row_id: str
    reason: Literal["stop", "length", "error"]
    message: str = ""
    """For `error`: what happened, fit for the client."""
    stats: RowStats = RowStats()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did. A row that ends has its last tokens in `tokens` and itself in `ends`."""

    tokens: tuple[RowTokens, ...] = ()
    ends: tuple[RowEnd, ...] = ()
    prefill: tuple[PrefillProgress, ...] = ()


class Engine(Protocol):
    """Decodes rows. Not thread-safe; made, used and closed on one thread.

    A row, once admitted, appears in exactly one `RowEnd` unless it is discarded first. Tokens of a row come in
    order and without holes. A failure that touches one row ends that row with reason `error`; one that touches
    all of them raises `EngineDeadError`.
    """

    @property
    def geometry(self) -> Geometry: ...

    @property
    def active_rows(self) -> int:
        """Rows admitted and neither ended, discarded nor paused, those still in prefill included.

        A row paused over a cycle under way counts until the tokens of that have been returned.
        """

    def row_bytes(self, tokens: int) -> int:
        """Memory one row of `tokens` tokens (prompt and completion) will take at most, in bytes."""

    def admit(self, row: Row) -> None:
        """Take a row; it joins at the next step boundary.

        Raises:
            RowRejectedError: more rows than `decode_batch_max` (paused ones aside), a row longer than
                `max_context_tokens`, an empty prompt, a token id outside the vocabulary, or a row id already active.
        """

    def pause(self, row_id: str) -> None:
        """Take a row out of the batch with all it has, so that it costs memory and no time; unknown ids are ignored.

        Tokens of a cycle under way still come, and may end the row.
        """

    def resume(self, row_id: str) -> None:
        """Let a paused row go on exactly where it was, from the next step on; ids of no paused row are ignored.

        Raises:
            RowRejectedError: `decode_batch_max` rows are here already; the row stays paused.
        """

    def discard(self, row_id: str) -> None:
        """Drop a row without an end; unknown ids are ignored. Tokens not yet returned are dropped with it."""

    def step(self) -> StepResult:
        """Admit what waits, prefill a chunk, decode one cycle, collect. Returns at once when nothing is active.

        Raises:
            EngineDeadError: the engine can no longer be used.
        """

    def idle(self) -> bool:
        """Do one short piece of work that waits for a time without rows; returns whether any is left, now or later.

        Call it only while nothing is active. A row that comes meanwhile waits for that piece.
        """

    def snapshot(self) -> Mapping[str, Any]:
        """Counters and state, as plain JSON values; safe to call between steps."""

    def close(self) -> None:
        """Drop all rows and free their memory."""


def _counted(counts: tuple[int, ...], places: int, *, up_to: int) -> tuple[int, ...]:
    """Counters of at least `places` places, the first `up_to` of them one higher."""
    longer = (*counts, *(0 for _ in range(places - len(counts))))
    return tuple(count + (place < up_to) for place, count in enumerate(longer))
