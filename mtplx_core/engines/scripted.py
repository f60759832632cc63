"""An engine without a model, for tests of everything around engines: each token is a function of prompt and position.

It keeps the contract of `engine.py` to the letter, takes its speed and its failures from a `Script`, imports no MLX
and samples nothing: sampling parameters are accepted and change nothing. `min_tokens` holds: no token that ends a row
is played before it, and an end that the script puts earlier comes then.
"""

from __future__ import annotations

import os
import signal
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from mtplx_core.engine import Geometry, PrefillProgress, Row, RowCycle, RowEnd, RowTokens, StepResult, TokenLogprob
from mtplx_core.engines.roster import Roster, RowProgress, end_tokens, row_end
from mtplx_core.errors import EngineDeadError

BYTES_PER_TOKEN = 1024
_HELD_POLL_S = 0.01
_by_priority = attrgetter("row.is_offline")
_MASK64 = (1 << 64) - 1


class StepWork(NamedTuple):
    """What a step is about to do, for the pace to decide how long that takes."""

    decoding_rows: int
    prefill_tokens: int


@dataclass(frozen=True, slots=True)
class ScriptedFault:
    """Something that goes wrong when a row would get its token at `position`.

    `row` ends that row with an error, as logits that are not finite do; `dead` makes the step raise
    `EngineDeadError`; `hang` blocks the step; `crash` kills this process at once.
    """

    kind: Literal["row", "dead", "hang", "crash"]
    position: int = 0
    strikes: Callable[[Row], bool] = lambda row: True
    """Which rows it strikes."""


@dataclass(frozen=True, slots=True)
class Script:
    """What a scripted engine plays."""

    vocab_size: int = 256
    first_token: int = 0
    """Token ids below it are never played, the way to keep off a tokenizer's control tokens."""
    tokens_per_step: tuple[int, ...] = (1,)
    """Tokens a row gets in its first, second, ... cycle, over and over: (1, 3) plays multi-token steps."""
    eos_token_id: int | None = None
    eos_position: Callable[[tuple[int, ...]], int | None] = lambda prompt: None
    """Position, by prompt, at which the end-of-sequence token stands."""
    faults: tuple[ScriptedFault, ...] = ()


def scripted_token(prompt: Sequence[int], position: int, vocab_size: int, *, first_token: int = 0) -> int:
    """The token a scripted engine plays at `position` of the completion of `prompt`."""
    return first_token + _mix(_prompt_key(prompt), position) % (vocab_size - first_token)


def scripted_completion(row: Row, script: Script) -> tuple[int, ...]:
    """All tokens of a row that nothing disturbs: what a client must see, whatever dies on the way."""
    eos_ids = _eos_ids(script)
    tokens: list[int] = []
    while row_end(row, tokens, eos_token_ids=eos_ids) is None:
        tokens.append(_play(row, len(tokens), script))
    return tuple(tokens)


def sleeping_pace(
    step_s: float, *, prefill_token_s: float = 0.0, is_held: Callable[[], bool] = lambda: False
) -> Callable[[StepWork], None]:
    """A pace in real time for processes that should look busy; tests in process pass their own callable.

    Args:
        is_held: no step ends while it says so.
    """
    pause = threading.Event()

    def pace(work: StepWork) -> None:
        pause.wait((step_s if work.decoding_rows else 0.0) + prefill_token_s * work.prefill_tokens)
        while is_held():
            pause.wait(_HELD_POLL_S)

    return pace


@dataclass(slots=True)
class _Active(RowProgress):
    prefilled: int = 0

    @property
    def prefill_total(self) -> int:
        return len(self.row.prompt) + len(self.row.committed)

    @property
    def is_decoding(self) -> bool:
        return self.prefilled == self.prefill_total


class ScriptedEngine:
    """The engine interface over a `Script`."""

    def __init__(
        self,
        geometry: Geometry,
        script: Script | None = None,
        *,
        pace: Callable[[StepWork], None] | None = None,
        hang: Callable[[], object] | None = None,
    ) -> None:
        self._geometry = geometry
        self._script = script or Script()
        self._pace = pace or (lambda work: None)
        self._hang = hang or threading.Event().wait
        self._roster: Roster[_Active] = Roster(geometry, self._script.vocab_size)
        self._eos_ids = _eos_ids(self._script)
        self._steps = 0
        self._tokens = 0
        self._dead = False

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @property
    def active_rows(self) -> int:
        return len(self._roster.active)

    def row_bytes(self, tokens: int) -> int:
        return tokens * BYTES_PER_TOKEN

    def admit(self, row: Row) -> None:
        self._roster.check(row)
        self._roster.add(_Active.of(row))

    def discard(self, row_id: str) -> None:
        self._roster.discard(row_id)

    def pause(self, row_id: str) -> None:
        self._roster.pause(row_id)

    def resume(self, row_id: str) -> None:
        self._roster.resume(row_id)

    def step(self) -> StepResult:
        if self._dead:
            raise EngineDeadError("the scripted engine has died before")
        if not self._roster.active:
            return StepResult()
        prefill = self._prefill()
        decoding = [active for active in self._roster.active.values() if active.is_decoding]
        self._pace(StepWork(len(decoding), sum(progress.fed for progress in prefill)))
        tokens: list[RowTokens] = []
        ends: list[RowEnd] = []
        for active in decoding:
            self._advance(active, width=len(decoding), tokens=tokens, ends=ends)
        for end in ends:
            del self._roster.active[end.row_id]
        self._steps += 1
        return StepResult(tuple(tokens), tuple(ends), tuple(progress.report for progress in prefill))

    def idle(self) -> bool:
        return False

    def snapshot(self) -> Mapping[str, Any]:
        return {
            "mode": "scripted",
            "active_rows": len(self._roster.active),
            "prefill_rows": sum(not active.is_decoding for active in self._roster.active.values()),
            "paused_rows": len(self._roster.paused),
            "steps": self._steps,
            "tokens": self._tokens,
        }

    def close(self) -> None:
        self._roster.clear()

    def _prefill(self) -> list[_Fed]:
        """Feed one chunk's worth of tokens, the oldest row that somebody waits for first."""
        budget = self._geometry.prefill_chunk_tokens
        fed: list[_Fed] = []
        for active in sorted(self._roster.active.values(), key=_by_priority):
            count = min(budget, active.prefill_total - active.prefilled)
            if count:
                budget -= count
                active.prefilled += count
                report = PrefillProgress(active.row.row_id, active.prefilled, active.prefill_total)
                fed.append(_Fed(count, report))
        return fed

    def _advance(self, active: _Active, *, width: int, tokens: list[RowTokens], ends: list[RowEnd]) -> None:
        row, start = active.row, len(active.tokens)
        count = self._script.tokens_per_step[active.stats.cycles % len(self._script.tokens_per_step)]
        cycle = active.count_cycle(RowCycle(width))
        end = active.end(eos_token_ids=self._eos_ids)
        while end is None and len(active.tokens) < start + count:
            end = self._play_one(active)
        if new := tuple(active.tokens[start:]):
            self._tokens += len(new)
            tokens.append(RowTokens(row.row_id, start, new, self._logprobs(row, start, new), cycle))
        if end is not None:
            ends.append(end)

    def _play_one(self, active: _Active) -> RowEnd | None:
        position = len(active.tokens)
        if error := self._strike(active.row, position):
            return active.fail(error)
        active.tokens.append(_play(active.row, position, self._script))
        return active.end(eos_token_ids=self._eos_ids)

    def _strike(self, row: Row, position: int) -> str:
        """Carry out the faults planned here; returns the error that ends the row, or nothing."""
        for fault in self._script.faults:
            if fault.position != position or not fault.strikes(row):
                continue
            if fault.kind == "row":
                return f"scripted failure at position {position}"
            if fault.kind == "hang":
                self._hang()
            elif fault.kind == "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                self._dead = True
                raise EngineDeadError(f"scripted death at position {position}")
        return ""

    def _logprobs(self, row: Row, start: int, tokens: Iterable[int]) -> tuple[TokenLogprob, ...] | None:
        if row.top_logprobs is None:
            return None
        return tuple(self._logprob(row, position, token) for position, token in enumerate(tokens, start))

    def _logprob(self, row: Row, position: int, token: int) -> TokenLogprob:
        """Made-up but fixed numbers: the played token is always the likeliest, its neighbours follow."""
        best = -(1 + _mix(_prompt_key(row.prompt), position + 1) % 1000) / 1000
        ranked = range(min(row.top_logprobs or 0, self._script.vocab_size))
        return TokenLogprob(best, tuple(((token + n) % self._script.vocab_size, best - n) for n in ranked))


class _Fed(NamedTuple):
    fed: int
    report: PrefillProgress


def _play(row: Row, position: int, script: Script) -> int:
    end = script.eos_position(row.prompt)
    if end is not None and not row.ignore_eos:
        end = max(end, row.min_tokens)
    if script.eos_token_id is not None and position == end:
        return script.eos_token_id
    token = scripted_token(row.prompt, position, script.vocab_size, first_token=script.first_token)
    # The end-of-sequence token stands where the script puts it and nowhere else.
    if token == script.eos_token_id:
        token = script.first_token + (token == script.first_token)
    return token if position >= row.min_tokens else _next_that_ends_nothing(row, token, script)


def _next_that_ends_nothing(row: Row, token: int, script: Script) -> int:
    """The first token from `token` on, around the ids played, that does not end the row."""
    ends = end_tokens(row, eos_token_ids=_eos_ids(script)) | _eos_ids(script)
    played = script.vocab_size - script.first_token
    turns = (script.first_token + (token - script.first_token + step) % played for step in range(played))
    return next((each for each in turns if each not in ends), token)


def _eos_ids(script: Script) -> frozenset[int]:
    return frozenset() if script.eos_token_id is None else frozenset({script.eos_token_id})


def _prompt_key(prompt: Sequence[int]) -> int:
    return int.from_bytes(blake2b(array("q", prompt).tobytes(), digest_size=8).digest(), "little")


def _mix(key: int, position: int) -> int:
    x = (key + (position + 1) * 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)
