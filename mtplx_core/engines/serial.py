"""Rows decoded each by itself: the serial lane with one row, the b1-exact profile with several in turn.

Every forward holds one row, so a row's numbers do not depend on who else is here; prompts are split at places that
depend on the prompt alone. The plain decoder that the other engines are measured against.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mtplx_core.caches.row_bytes import cache_bytes
from mtplx_core.engine import Geometry, PrefillProgress, Row, RowCycle, RowEnd, RowTokens, StepResult, TokenLogprob
from mtplx_core.engines.roster import Roster, RowProgress, with_end_tokens
from mtplx_core.errors import EngineDeadError
from mtplx_core.models.loader import LoadedModel
from mtplx_core.sampling.logprobs import LogprobArrays, logprob_arrays, row_logprobs
from mtplx_core.sampling.penalties import RowHistory, has_penalties, row_history
from mtplx_core.sampling.sampler import SamplingBatch

NOT_FINITE = "the model produced numbers that are not finite"
_CLEAR_EVERY_STEPS = 256
_by_priority = attrgetter("row.is_offline")
_FORWARDS_PER_STEP = 4
"""The most prefill forwards between two decoding steps, however few tokens each feeds."""
_MLX_LM_CHUNK_TOKENS = 2048
"""Where mlx-lm's own generation splits a prompt."""


@dataclass(slots=True, eq=False)
class _Active(RowProgress):
    cache: list[Any] = field(default_factory=list)
    fed: int = 0
    """Tokens of the sequence that are in the cache."""
    sampler: SamplingBatch | None = None
    history: RowHistory | None = None

    @property
    def left_to_prefill(self) -> int:
        """The last token is fed by the first decoding step, which needs its logits."""
        return len(self.row.prompt) + len(self.tokens) - 1 - self.fed


@dataclass(slots=True, eq=False)
class _Choice:
    """One row's next token, on the device until the step is evaluated."""

    token: mx.array
    """(1, 1)"""
    is_finite: mx.array
    """(1, 1)"""
    logprobs: LogprobArrays | None


class SerialEngine:
    """See `Engine`. Holds up to `decode_batch_max` rows and runs one forward per row and step.

    Args:
        lane: shown in snapshots.
        replays_committed: split prompts where mlx-lm's own generation does and feed committed tokens one at a time,
            as they were decoded: then a row's numbers are those of `mlx_lm.generate`, after a restart too.
    """

    def __init__(
        self, loaded: LoadedModel, geometry: Geometry, *, lane: str = "serial", replays_committed: bool = False
    ) -> None:
        self._lane = lane
        self._replays_committed = replays_committed
        self._model: Any = loaded.model
        self._vocab_size = loaded.vocab_size
        self._roster: Roster[_Active] = Roster(geometry, loaded.vocab_size)
        self._eos_ids = loaded.eos_token_ids
        self._geometry = geometry
        self._cache_bytes = cache_bytes(loaded.model, chunk_tokens=geometry.prefill_chunk_tokens)
        self._steps = self._tokens = self._prefill_tokens = 0
        self._is_dead = False

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @property
    def active_rows(self) -> int:
        return len(self._roster.active)

    def row_bytes(self, tokens: int) -> int:
        return self._cache_bytes.of(tokens)

    def admit(self, row: Row) -> None:
        self._roster.check(row)
        row = with_end_tokens(row, eos_token_ids=self._eos_ids)
        active = _Active.of(row)
        active.cache = list(make_prompt_cache(self._model))
        active.sampler = SamplingBatch([row.sampling], vocab_size=self._vocab_size)
        if has_penalties(row.sampling):
            active.history = row_history(row.prompt, row.committed, vocab_size=self._vocab_size)
        self._roster.add(active)

    def discard(self, row_id: str) -> None:
        self._roster.discard(row_id)

    def pause(self, row_id: str) -> None:
        self._roster.pause(row_id)

    def resume(self, row_id: str) -> None:
        self._roster.resume(row_id)

    def step(self) -> StepResult:
        if self._is_dead:
            raise EngineDeadError("an earlier step failed")
        try:
            return self._step()
        except Exception as error:
            self._is_dead = True
            raise EngineDeadError(f"a decoding step failed: {error}") from error

    def idle(self) -> bool:
        return False

    def snapshot(self) -> Mapping[str, Any]:
        return {
            "mode": "serial",
            "lane": self._lane,
            "active_rows": len(self._roster.active),
            "prefill_rows": sum(active.left_to_prefill > 0 for active in self._roster.active.values()),
            "paused_rows": len(self._roster.paused),
            "steps": self._steps,
            "tokens": self._tokens,
            "prefill_tokens": self._prefill_tokens,
            "cache_bytes": sum(layer.nbytes for active in self._roster.held for layer in active.cache),
        }

    def close(self) -> None:
        self._roster.clear()
        mx.clear_cache()

    def _step(self) -> StepResult:
        if not self._roster.active:
            return StepResult()
        ends = [end for active in self._roster.active.values() if (end := active.end(eos_token_ids=self._eos_ids))]
        self._drop(ends)  # their last token had been committed before they came here
        prefill = self._prefill()
        decoding = [active for active in self._roster.active.values() if active.left_to_prefill == 0]
        tokens, new_ends = self._decode(decoding)
        self._drop(new_ends)
        self._steps += 1
        if self._steps % _CLEAR_EVERY_STEPS == 0:
            mx.clear_cache()
        return StepResult(tuple(tokens), (*ends, *new_ends), tuple(prefill))

    def _drop(self, ends: Sequence[RowEnd]) -> None:
        for end in ends:
            del self._roster.active[end.row_id]

    def _prefill(self) -> list[PrefillProgress]:
        """Feed whole chunks until one chunk's worth of tokens has been fed, rows that somebody waits for first."""
        budget = self._geometry.prefill_chunk_tokens
        progress: list[PrefillProgress] = []
        for active in sorted(self._roster.active.values(), key=_by_priority):
            while active.left_to_prefill > 0 and budget > 0:
                count = self._chunk(active)
                self._feed(active, count)
                budget -= max(count, self._geometry.prefill_chunk_tokens // _FORWARDS_PER_STEP)
                done = active.fed + (active.left_to_prefill == 0)
                progress.append(PrefillProgress(active.row.row_id, done, len(active.sequence)))
        return progress

    def _chunk(self, active: _Active) -> int:
        if not self._replays_committed:
            return min(active.left_to_prefill, self._geometry.prefill_chunk_tokens)
        left_of_prompt = len(active.row.prompt) - 1 - active.fed
        return min(left_of_prompt, _MLX_LM_CHUNK_TOKENS) if left_of_prompt > 0 else 1

    def _feed(self, active: _Active, count: int) -> None:
        chunk = active.sequence[active.fed : active.fed + count]
        self._model(mx.array([chunk]), cache=active.cache)
        mx.eval([layer.state for layer in active.cache])
        mx.clear_cache()
        active.fed += count
        self._prefill_tokens += count

    def _decode(self, decoding: Sequence[_Active]) -> tuple[list[RowTokens], list[RowEnd]]:
        if not decoding:
            return [], []
        choices = [self._choose(active) for active in decoding]
        chosen = mx.concatenate([choice.token for choice in choices], axis=1)
        finite = mx.concatenate([choice.is_finite for choice in choices], axis=1)
        # The one evaluation of the step.
        mx.eval(chosen, finite, [list(choice.logprobs) for choice in choices if choice.logprobs is not None])
        ids: Any = chosen[0].tolist()
        is_finite: Any = finite[0].tolist()
        tokens: list[RowTokens] = []
        ends: list[RowEnd] = []
        for active, choice, token, is_good in zip(decoding, choices, ids, is_finite, strict=True):
            active.count_cycle(RowCycle())
            if not is_good:
                ends.append(active.fail(NOT_FINITE))
                continue
            tokens.append(self._commit(active, token, choice.logprobs))
            if end := active.end(eos_token_ids=self._eos_ids):
                ends.append(end)
        return tokens, ends

    def _choose(self, active: _Active) -> _Choice:
        assert active.sampler is not None
        logits = self._model(mx.array([active.sequence[-1:]]), cache=active.cache)  # (1, 1, vocab)
        active.fed += 1
        token = active.sampler.choose(logits, mx.array([len(active.tokens)]), history=[active.history])
        top = active.row.top_logprobs
        logprobs = None if top is None else logprob_arrays(logits, token, top=top)
        return _Choice(token, mx.all(logits < mx.inf, axis=-1), logprobs)

    def _commit(self, active: _Active, token: int, logprobs: LogprobArrays | None) -> RowTokens:
        position = len(active.tokens)
        active.tokens.append(token)
        self._tokens += 1
        if active.history is not None:
            active.history = active.history.append([token])
        details: tuple[TokenLogprob, ...] | None = None
        if logprobs is not None:
            details = row_logprobs(logprobs, row=0, count=1, top=active.row.top_logprobs or 0)
        return RowTokens(active.row.row_id, position, (token,), details)
