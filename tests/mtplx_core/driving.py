"""Drives an engine to the end in tests and gathers what it said."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mtplx_core.engine import Engine, PrefillProgress, Row, RowEnd, StepResult, TokenLogprob
from mtplx_core.models.loader import LoadedModel
from mtplx_core.sampling.audit import FLOAT32_TOLERANCE, compare

ROUNDING = 1e-4
"""More than two products of these models' size can differ by when they round differently, in logits."""


@dataclass
class Heard:
    """Everything an engine reported, checked for holes on the way in."""

    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[str, list[TokenLogprob]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[str, RowEnd] = field(default_factory=dict)
    prefill: list[PrefillProgress] = field(default_factory=list)
    starts: dict[str, int] = field(default_factory=dict)
    steps: int = 0

    def take(self, result: StepResult) -> None:
        self.steps += 1
        self.prefill += result.prefill
        for part in result.tokens:
            assert part.row_id not in self.ends
            start = self.starts.setdefault(part.row_id, part.position)
            assert part.position == start + len(self.tokens[part.row_id])
            self.tokens[part.row_id] += part.tokens
            if part.logprobs is not None:
                assert len(part.logprobs) == len(part.tokens)
                self.logprobs[part.row_id] += part.logprobs
        for end in result.ends:
            assert end.row_id not in self.ends
            self.ends[end.row_id] = end


def run(
    engine: Engine,
    rows: Sequence[Row],
    *,
    before_step: Callable[[int], None] = lambda step: None,
    most_steps: int = 2000,
) -> Heard:
    """Admit `rows`, then step until nothing is active; `before_step` may join and discard rows."""
    heard = Heard()
    for row in rows:
        engine.admit(row)
    for step in range(most_steps):
        before_step(step)
        if not engine.active_rows:
            return heard
        heard.take(engine.step())
    raise AssertionError(f"{engine.active_rows} rows are still active after {most_steps} steps")


def assert_same_answer(loaded: LoadedModel, row: Row, one: Heard, other: Heard) -> None:
    """Fail unless two runs agree on `row`, token by token or up to a tie, with its logprobs up to rounding."""
    tokens, others = one.tokens[row.row_id], other.tokens[row.row_id]
    result = compare(loaded.model, row.prompt, tokens, others, row.sampling)
    assert result.passed, (row.row_id, result)
    equal = len(tokens) if result.first_difference is None else result.first_difference
    pairs = list(zip(one.logprobs[row.row_id], other.logprobs[row.row_id], strict=False))[:equal]
    assert len(pairs) == (equal if row.top_logprobs is not None else 0)
    assert all(abs(here.logprob - there.logprob) < FLOAT32_TOLERANCE for here, there in pairs)


def assert_decided(loaded: LoadedModel, row: Row, answer: Sequence[int]) -> None:
    """Fail unless every token of a greedy answer leads by more than rounding: then each run must give these tokens."""
    assert row.sampling.is_greedy
    model: Any = loaded.model
    logits = model(mx.array([[*row.prompt, *answer[:-1]]]))[0, len(row.prompt) - 1 :]  # (tokens, vocab)
    second, first = mx.split(mx.topk(logits, 2, axis=-1), 2, axis=-1)
    lead: Any = mx.min(mx.abs(first - second)).item()
    assert lead > ROUNDING
