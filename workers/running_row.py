"""One request on this worker: its tokens, how far they are committed, and how it ends. No I/O.

A row keeps all its tokens until it has ended in Redis, because a log that lost its last moments asks for them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from broker.scripts import RowCommit, RowFinish
from broker.wire import (
    Assignment,
    Cause,
    Failed,
    Finished,
    FinishReason,
    Logprob,
    Progress,
    Request,
    Stats,
    Status,
    Tokens,
    encode,
    pack_tokens,
    unpack_tokens,
)
from mtplx_core.engine import PrefillProgress, Row, RowStats, RowTokens, SamplingParams
from workers.stop_detection import StopDetector

ANY_LENGTH = -1
TOKEN_BYTES = 4


@dataclass(slots=True, eq=False)
class ActiveRow:
    """A seat of this worker, from the job until FINISH, HAND_BACK or its loss."""

    seat: Assignment
    request: Request
    prompt: tuple[int, ...]
    seed: int
    reply: str
    """Reply channel of the listener; empty when nobody listens."""
    text: StopDetector
    is_offline: bool = False
    age_s: float = 0.0
    """How long ago it was accepted when it was sent here."""
    cohort: str = ""
    """The cohort it came with."""
    resumed: int = 0
    """Tokens that earlier attempts had committed."""
    stats: RowStats = RowStats()
    """What it went through here so far."""
    packed: bytearray = field(default_factory=bytearray)
    """All tokens of the completion, as in the log."""
    logprobs: list[Logprob] = field(default_factory=list)
    """One for each token, where the request asks for them."""
    committed: int = 0
    """Tokens the log is known to hold."""
    finish: RowFinish | None = None
    """How the row ends, once that is known; kept as it is, since FINISH may be sent again."""
    is_submitted: bool = False
    """Whether the engine has it."""
    is_paused: bool = False
    """Whether the engine has it and does not decode it."""
    seated_s: float = 0.0
    """When it came here."""
    back_since_s: float | None = None
    """When it went on after it had given way to interactive work; None: it never did."""
    progress: PrefillProgress | None = None
    """What the listener has not heard of yet."""
    progress_told_s: float | None = None

    @property
    def id(self) -> str:
        """Its name in the engine: two attempts at a request are two rows."""
        return f"{self.seat.request_id}:{self.seat.attempt}"

    @property
    def length(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    @property
    def has_uncommitted(self) -> bool:
        return self.committed < self.length

    @property
    def is_running(self) -> bool:
        return self.finish is None

    @property
    def is_decoding(self) -> bool:
        """Whether it takes a place in the engine."""
        return self.is_running and self.is_submitted and not self.is_paused

    @property
    def committed_here(self) -> int:
        """Tokens of this attempt that are in the log."""
        return self.committed - self.resumed

    @property
    def cached_tokens(self) -> int:
        """Tokens whose keys and values the engine keeps, at most."""
        return len(self.prompt) + self.length

    def resume(self, tokens: bytes, logprobs: Sequence[Logprob]) -> None:
        """Take over what earlier attempts have committed."""
        self.packed += tokens
        self.logprobs += logprobs
        self.committed = self.resumed = self.length
        if self.text.feed(unpack_tokens(tokens)).is_stopped:
            self.end("stop")

    def take(self, new: RowTokens) -> bool:
        """Take new tokens from the engine; whether a stop string has ended the row."""
        kept = self.text.feed(new.tokens)
        self.stats = self.stats.after(new.cycle._replace(accepted=min(new.cycle.accepted, kept.size)))
        self.packed += pack_tokens(new.tokens[: kept.size])
        if new.logprobs is not None:
            self.logprobs += [Logprob(*scores) for scores in new.logprobs[: kept.size]]
        if kept.is_stopped:
            self.end("stop")
        return kept.is_stopped

    def end(self, reason: Literal["stop", "length"], stats: RowStats | None = None) -> None:
        """The completion is whole. `stats`: the engine's own, where it has ended the row."""
        self.stats = stats or self.stats
        event = Finished(self.seat.request_id, reason, self.length, self.text.end, None, _stats(self.stats))
        self.finish = RowFinish(self.seat, self.length, "finished", reason, event)

    def cancel(self, cause: Cause) -> None:
        """Somebody wants it to end: what is not committed is dropped."""
        del self.packed[self.committed * TOKEN_BYTES :]
        del self.logprobs[self.committed :]
        status, reason = end_of(cause)
        event = Finished(self.seat.request_id, reason, self.length, cause=cause, stats=_stats(self.stats))
        self.finish = RowFinish(self.seat, self.length, status, cause, event)

    def fail(self, code: str, message: str) -> None:
        self.finish = RowFinish(self.seat, ANY_LENGTH, "failed", code, Failed(self.seat.request_id, code, message))

    def engine_row(self) -> Row:
        """What the engine is asked to do."""
        request = self.request
        return Row(
            row_id=self.id,
            prompt=self.prompt,
            max_tokens=request.max_tokens,
            sampling=_sampling(request, self.seed),
            committed=unpack_tokens(bytes(self.packed)),
            stop_token_ids=frozenset(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
            top_logprobs=request.top_logprobs,
            is_offline=self.is_offline,
            min_tokens=request.min_tokens,
        )

    def commit(self) -> RowCommit:
        """What COMMIT is told of it; no tokens while there are none, so that cancellation reaches it."""
        scores = [encode(logprob) for logprob in self.logprobs[self.committed :]]
        return RowCommit(self.seat, self.committed, bytes(self.packed[self.committed * TOKEN_BYTES :]), scores)

    def news(self, commit: RowCommit) -> Tokens | None:
        """What the listener is told of a commit."""
        if not commit.tokens:
            return None
        count = len(commit.tokens) // TOKEN_BYTES
        scores = self.logprobs[commit.position : commit.position + count]
        return Tokens(self.seat.request_id, commit.position, commit.tokens, tuple(scores) if scores else None)

    def tell_progress(self, now_s: float, *, every_s: float) -> Progress | None:
        """The progress of prefill, now and then; the last of it always."""
        if self.progress is None:
            return None
        is_last = self.progress.done >= self.progress.total
        if not is_last and self.progress_told_s is not None and now_s - self.progress_told_s < every_s:
            return None
        told, self.progress, self.progress_told_s = self.progress, None, now_s
        return Progress(self.seat.request_id, told.done, told.total)


def end_of(cause: Cause) -> tuple[Status, FinishReason]:
    """The status and finish reason that a cause leads to; the scripts end waiting requests by the same rule."""
    match cause:
        case "deadline":
            return "expired", "deadline"
        case "stop":
            return "finished", "stop"
        case _:
            return "cancelled", "cancelled"


def _sampling(request: Request, seed: int) -> SamplingParams:
    asked = request.sampling
    return SamplingParams(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        logit_bias=asked.logit_bias,
        seed=seed,
    )


def _stats(stats: RowStats) -> Stats:
    return Stats(stats.cycles, stats.drafted, stats.accepted, stats.min_width, stats.max_width)
