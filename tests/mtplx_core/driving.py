"""Drives an engine to the end in tests and gathers what it said."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mtplx_core.engine import Engine, PrefillProgress, Row, RowEnd, StepResult, TokenLogprob


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
