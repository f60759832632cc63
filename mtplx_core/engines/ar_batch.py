"""Rows decoded together, one token per row and step, on mlx-lm's own batch generator with the shared sampler.

The generator sees to caches, padding and prefill. It asks for a token through hooks that know neither rows nor
positions; `_SamplerHook` puts both back. One step is always on the device while the host reads the one before, so a
row that ends has been decoded one token too far, which is thrown away, and one that is paused has one token to come.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from mtplx_core.caches.row_bytes import cache_bytes
from mtplx_core.engine import Geometry, PrefillProgress, Row, RowCycle, RowEnd, RowTokens, StepResult, TokenLogprob
from mtplx_core.engines.lane_guard import refuse_inside_mtp_lane
from mtplx_core.engines.roster import Roster, RowProgress, with_end_tokens
from mtplx_core.engines.serial import NOT_FINITE
from mtplx_core.errors import EngineDeadError, UnsupportedModeError
from mtplx_core.models.grouped_masks import group_masks
from mtplx_core.models.loader import LoadedModel
from mtplx_core.models.padding import padding_refusal
from mtplx_core.sampling.logprobs import LogprobArrays, logprob_arrays, row_logprobs
from mtplx_core.sampling.penalties import RowHistory, has_penalties
from mtplx_core.sampling.sampler import SamplingBatch

_NO_LIMIT = sys.maxsize
_by_priority = attrgetter("row.is_offline")


class _Chosen(NamedTuple):
    """What one call of the sampler made of one row; arrays are shared by the rows of the call."""

    place: int
    tokens: mx.array
    """(rows, 1)"""
    is_finite: mx.array
    """(rows, 1) bool"""
    logprobs: LogprobArrays | None


@dataclass(slots=True, eq=False)
class _Active(RowProgress):
    uid: int = -1
    """The generator's name for the row; -1 before it is inserted."""
    is_prefilling: bool = True
    left_to_prefill: int = 0
    chosen: deque[_Chosen] = field(default_factory=deque)
    """Sampled and not yet handed out by the generator, oldest first."""
    prompt_mask: mx.array | None = None
    """Which tokens stand in the prompt, (vocab,) bool; None without penalties."""
    caches: list[Any] | None = None
    """What was fed of it, while it is not in the generator."""
    cached: int = 0
    """Tokens of the sequence that were in `caches` when it was last given to the generator."""


class _Pending(NamedTuple):
    """A row's logits between the generator's two hooks."""

    active: _Active
    context: mx.array
    logits: mx.array
    """(1, vocab)"""


class _SamplerHook:
    """Joins the generator's per-row logits hook and its sampler hook into one call of the shared sampler."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._pending: list[_Pending] = []
        self._batch: tuple[list[_Active], SamplingBatch] | None = None

    def row_hook(self, active: _Active) -> Callable[[mx.array, mx.array], mx.array]:
        def record(context: mx.array, logits: mx.array) -> mx.array:
            self._pending.append(_Pending(active, context, logits))
            # The generator normalises what it gets back over the vocabulary, for logprobs that are not used here.
            return logits[:, :1].astype(mx.float32)

        return record

    def sample(self, _: mx.array) -> mx.array:
        """Tokens of the rows recorded since the last call, (rows,)."""
        pending, self._pending = self._pending, []
        actives = [entry.active for entry in pending]
        logits = mx.concatenate([entry.logits for entry in pending])[:, None]  # (rows, 1, vocab)
        starts = [entry.context.size - len(entry.active.row.prompt) for entry in pending]
        history = [self._history(entry) for entry in pending]
        tokens = self._sampling_batch(actives).choose(logits, mx.array(starts), history=history)
        is_finite = mx.all(logits < mx.inf, axis=-1)
        asked = [active.row.top_logprobs for active in actives if active.row.top_logprobs is not None]
        logprobs = logprob_arrays(logits, tokens, top=max(asked)) if asked else None
        # Started with the tokens: a later start would queue behind the next forward.
        mx.async_eval(tokens, is_finite, list(logprobs or ()))  # type: ignore[no-untyped-call]  # mlx's stub
        for place, active in enumerate(actives):
            active.chosen.append(_Chosen(place, tokens, is_finite, logprobs))
        return tokens[:, 0]

    def _sampling_batch(self, actives: list[_Active]) -> SamplingBatch:
        if self._batch is None or self._batch[0] != actives:
            rows = [active.row.sampling for active in actives]
            self._batch = (actives, SamplingBatch(rows, vocab_size=self._vocab_size))
        return self._batch[1]

    def _history(self, entry: _Pending) -> RowHistory | None:
        mask = entry.active.prompt_mask
        if mask is None:
            return None
        empty = RowHistory(mx.zeros((self._vocab_size,), mx.float32), mask)
        return empty.append(entry.context[len(entry.active.row.prompt) :])


class ArBatchEngine:
    """See `Engine`.

    Raises:
        UnsupportedModeError: rows of this model must not be padded.
    """

    def __init__(self, loaded: LoadedModel, geometry: Geometry) -> None:
        if reason := padding_refusal(loaded.model):
            raise UnsupportedModeError(f"ar_batch cannot run this model: {reason}; use serial")
        self._vocab_size = loaded.vocab_size
        self._eos_ids = loaded.eos_token_ids
        self._geometry = geometry
        self._cache_bytes = cache_bytes(loaded.model, chunk_tokens=geometry.prefill_chunk_tokens)
        self._hook = _SamplerHook(loaded.vocab_size)
        group_masks(loaded.model)
        self._generator = _generator(loaded.model, geometry, self._hook)
        self._roster: Roster[_Active] = Roster(geometry, loaded.vocab_size)
        self._by_uid: dict[int, _Active] = {}
        self._steps = self._tokens = self._prefill_tokens = 0
        self._is_dead = False

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @property
    def active_rows(self) -> int:
        return len(self._roster.active) + sum(bool(active.chosen) for active in self._roster.paused.values())

    def row_bytes(self, tokens: int) -> int:
        """Rows are padded to the longest beside them, so any row may come to take as much as the longest allowed."""
        return self._cache_bytes.of(max(tokens, self._geometry.max_context_tokens))

    def admit(self, row: Row) -> None:
        refuse_inside_mtp_lane("ArBatchEngine.admit")
        self._roster.check(row)
        row = with_end_tokens(row, eos_token_ids=self._eos_ids)
        active = _Active.of(row)
        active.left_to_prefill = len(active.sequence) - 1
        if has_penalties(row.sampling):
            seen = mx.zeros((self._vocab_size,), mx.bool_)
            active.prompt_mask = seen.at[mx.array(row.prompt)].maximum(mx.array(True))
            mx.eval(active.prompt_mask)
        self._roster.add(active)

    def discard(self, row_id: str) -> None:
        active = self._roster.discard(row_id)
        if active is not None and self._by_uid.pop(active.uid, None) is not None:
            self._generator.remove([active.uid])

    def pause(self, row_id: str) -> None:
        if (active := self._roster.pause(row_id)) is not None:
            self._lift(active)

    def resume(self, row_id: str) -> None:
        self._roster.resume(row_id)

    def step(self) -> StepResult:
        refuse_inside_mtp_lane("ArBatchEngine.step")
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
            "mode": "ar_batch",
            "active_rows": len(self._roster.active),
            "prefill_rows": sum(active.is_prefilling for active in self._roster.active.values()),
            "paused_rows": len(self._roster.paused),
            "steps": self._steps,
            "tokens": self._tokens,
            "prefill_tokens": self._prefill_tokens,
            "cache_bytes": int(self._generator.prompt_cache_nbytes) + self._lifted_bytes,
        }

    def close(self) -> None:
        for row_id in [*self._roster.active, *self._roster.paused]:
            self.discard(row_id)
        mx.clear_cache()

    @property
    def _lifted_bytes(self) -> int:
        return sum(layer.nbytes for active in self._roster.held for layer in active.caches or ())

    def _step(self) -> StepResult:
        if not self.active_rows:
            return StepResult()
        tokens: list[RowTokens] = []
        new_ends: list[RowEnd] = []
        self._collect_lifted(tokens, new_ends)
        self._drop(new_ends)
        # A row may come with its last token already committed.
        ends = [end for active in self._roster.active.values() if (end := active.end(eos_token_ids=self._eos_ids))]
        self._drop(ends)
        self._insert_waiting()
        prompt_responses, responses = self._generator.next() if self._by_uid else ((), ())
        width = len(responses)
        for response in responses:
            self._collect(self._by_uid[response.uid], response.token, width=width, tokens=tokens, ends=new_ends)
        prefill = [self._prefilled(self._by_uid[r.uid], *r.progress) for r in prompt_responses]
        self._drop(new_ends)
        self._steps += 1
        return StepResult(tuple(tokens), (*ends, *new_ends), tuple(p for p in prefill if p is not None))

    def _drop(self, ends: list[RowEnd]) -> None:
        for end in ends:
            self.discard(end.row_id)

    def _insert_waiting(self) -> None:
        """Hand rows to the generator while the prompts it pads and feeds at once stay within one chunk."""
        waiting = sorted((active for active in self._roster.active.values() if active.uid < 0), key=_by_priority)
        if waiting and not waiting[0].row.is_offline:
            for active in [a for a in self._by_uid.values() if a.is_prefilling and a.row.is_offline]:
                self._lift(active)
                waiting.append(active)
        chunk = self._geometry.prefill_chunk_tokens
        feeding = [min(a.left_to_prefill, chunk) for a in self._by_uid.values() if a.is_prefilling]
        for active in waiting:
            wider = [*feeding, min(active.left_to_prefill, chunk)]
            if feeding and max(wider) * len(wider) > chunk:
                return
            feeding = wider
            self._insert(active)

    def _insert(self, active: _Active) -> None:
        fed, left = list(active.sequence[: active.cached]), list(active.sequence[active.cached :])
        (active.uid,) = self._generator.insert(
            [left],
            caches=None if active.caches is None else [active.caches],
            all_tokens=[fed],
            logits_processors=[[self._hook.row_hook(active)]],
        )
        active.caches = None
        self._by_uid[active.uid] = active

    def _lift(self, active: _Active) -> None:
        """Take a row out of the generator with what was fed of it; what was sampled for it stays in `chosen`."""
        if self._by_uid.pop(active.uid, None) is None:
            return
        lifted = self._generator.remove([active.uid], return_prompt_caches=True)
        caches, tokens = lifted[active.uid]
        active.uid, active.cached = -1, len(tokens)
        active.caches = caches if tokens else None
        # Slices of the batch would keep all of it alive.
        mx.async_eval([layer.state for layer in active.caches or ()])  # type: ignore[no-untyped-call]  # mlx's stub

    def _collect_lifted(self, tokens: list[RowTokens], ends: list[RowEnd]) -> None:
        """Hand out what was sampled for rows before they were taken out of the generator."""
        for active in [*self._roster.paused.values(), *self._roster.active.values()]:
            if active.uid < 0 and active.chosen:
                chosen = active.chosen[0]
                token: Any = chosen.tokens[chosen.place, 0].item()
                self._collect(active, token, width=max(active.stats.max_width, 1), tokens=tokens, ends=ends)

    def _prefilled(self, active: _Active, done: int, total: int) -> PrefillProgress | None:
        """Progress of a row, if this step fed some of its prompt."""
        fed = active.left_to_prefill - max(total - 1 - done, 0)
        active.left_to_prefill -= fed
        active.is_prefilling = done < total
        self._prefill_tokens += fed
        done += active.left_to_prefill == 0 and done < total
        return PrefillProgress(active.row.row_id, active.cached + done, active.cached + total) if fed else None

    def _collect(self, active: _Active, token: int, *, width: int, tokens: list[RowTokens], ends: list[RowEnd]) -> None:
        chosen = active.chosen.popleft()
        cycle = active.count_cycle(RowCycle(width))
        is_finite: Any = chosen.is_finite.tolist()
        if not is_finite[chosen.place][0]:
            ends.append(active.fail(NOT_FINITE))
            return
        position = len(active.tokens)
        active.tokens.append(token)
        self._tokens += 1
        tokens.append(RowTokens(active.row.row_id, position, (token,), _logprobs(active.row, chosen), cycle))
        if end := active.end(eos_token_ids=self._eos_ids):
            ends.append(end)


def _generator(model: Any, geometry: Geometry, hook: _SamplerHook) -> Any:
    generator: Any = BatchGenerator(
        model,
        max_tokens=_NO_LIMIT,
        sampler=hook.sample,
        completion_batch_size=geometry.decode_batch_max,
        prefill_batch_size=geometry.decode_batch_max,
        prefill_step_size=geometry.prefill_chunk_tokens,
        stream=mx.new_stream(mx.default_device()),
    )
    # The constructor wires as much memory as the system allows, which is known to bring Macs down. Closing puts the
    # old limit back and does nothing else.
    generator.close()
    return generator


def _logprobs(row: Row, chosen: _Chosen) -> tuple[TokenLogprob, ...] | None:
    if row.top_logprobs is None or chosen.logprobs is None:
        return None
    return row_logprobs(chosen.logprobs, row=chosen.place, count=1, top=row.top_logprobs)
