"""Runs ragged rows that join and leave through one engine and holds every answer against mlx-lm's own forward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from mtplx_core.engine import Engine, Geometry, Row, SamplingParams, TokenLogprob
from mtplx_core.models.loader import LoadedModel
from mtplx_core.models.own_call import logits_in_one_forward
from mtplx_core.sampling.audit import audit

GEOMETRY = Geometry(decode_batch_max=3, max_context_tokens=64, depth=3, prefill_chunk_tokens=16)
TOLERANCE = 2e-3
"""In nats: what a logprob may be off by the order of additions."""
_STEPS_MAX = 400
_SEEDED = SamplingParams(temperature=0.8, seed=7)

FIRST_ROWS = (
    Row("greedy", (10, 20, 30), 15, ignore_eos=True, top_logprobs=0),
    Row("seeded", tuple(range(40, 59)), 7, _SEEDED, ignore_eos=True, top_logprobs=0),
)
LATE_ROWS = {
    3: Row("late", (70, 71, 72, 73, 70, 71, 72, 73, 70), 9, ignore_eos=True, top_logprobs=0),
    8: Row("last", tuple(range(90, 120)), 6, SamplingParams(temperature=0.8, seed=11), ignore_eos=True, top_logprobs=0),
}
"""By the step before which they join; the first to end makes room for the last."""
ROWS = (*FIRST_ROWS, *LATE_ROWS.values())


@dataclass(slots=True)
class Answers:
    """What the rows got."""

    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[str, list[TokenLogprob]] = field(default_factory=lambda: defaultdict(list))
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far the answers are from mlx-lm's own forward."""

    worst: float
    """Largest difference of a logprob, in nats; infinite where one of them is not finite."""
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failures


def run_rows(engine: Engine) -> Answers:
    """Decode all rows; those that join late wait for a free place."""
    answers, waiting = Answers(), dict(LATE_ROWS)
    for row in FIRST_ROWS[: engine.geometry.decode_batch_max]:
        engine.admit(row)
    left = list(FIRST_ROWS[engine.geometry.decode_batch_max :])
    for step in range(_STEPS_MAX):
        left += [waiting.pop(due) for due in sorted(waiting) if due <= step]
        while left and engine.active_rows < engine.geometry.decode_batch_max:
            engine.admit(left.pop(0))
        if not engine.active_rows and not left and not waiting:
            return answers
        _take(answers, engine)
    raise AssertionError(f"{engine.active_rows} rows are still active after {_STEPS_MAX} steps")


def judge(loaded: LoadedModel, answers: Answers) -> Verdict:
    """Compare logprobs with one forward over prompt and answer, and audit every token."""
    worst, failures = 0.0, list(answers.errors)
    for row in ROWS:
        tokens = answers.tokens[row.row_id]
        if len(tokens) != row.max_tokens:
            failures.append(f"row {row.row_id} got {len(tokens)} of {row.max_tokens} tokens")
            continue
        gap = _logprob_gap(loaded.model, row, tokens, answers.logprobs[row.row_id])
        worst = max(worst, gap)
        if not gap < TOLERANCE:
            failures.append(f"row {row.row_id}: a logprob is {gap:.3g} off")
        checked = audit(loaded.model, row.prompt, tokens, row.sampling)
        if not checked.passed:
            failures.append(f"row {row.row_id}: {len(checked.mismatches)} tokens are not the sampler's")
    return Verdict(worst, tuple(failures))


def _take(answers: Answers, engine: Engine) -> None:
    result = engine.step()
    for part in result.tokens:
        answers.tokens[part.row_id] += part.tokens
        answers.logprobs[part.row_id] += part.logprobs or ()
    answers.errors += [f"row {end.row_id}: {end.message}" for end in result.ends if end.reason == "error"]


def _logprob_gap(model: Any, row: Row, tokens: Sequence[int], said: Sequence[TokenLogprob]) -> float:
    logits = logits_in_one_forward(model, mx.array([[*row.prompt, *tokens[:-1]]]))
    logits = logits[0, len(row.prompt) - 1 :].astype(mx.float32)  # (tokens, vocab)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    own = np.array(mx.take_along_axis(logprobs, mx.array(list(tokens))[:, None], axis=-1))[:, 0]
    gaps = np.abs(own - np.array([entry.logprob for entry in said]))
    return float(gaps.max()) if np.isfinite(gaps).all() else float("inf")
