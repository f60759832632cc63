"""What the MTP lane has done, counted for snapshots, health pages and metrics. Imports no MLX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtplx_core.mtp.depth import CycleOutcome

_CYCLE_WEIGHT = 0.1


@dataclass(slots=True)
class Telemetry:
    """Counters since the engine was made."""

    cycles: int = 0
    tokens: int = 0
    prefill_tokens: int = 0
    """Tokens of prompts fed."""
    shared_tokens: int = 0
    """Tokens of prompts taken over from another's beginning."""
    joined: int = 0
    left: Counter[str] = field(default_factory=Counter)
    """Rows gone, by how: stop, length, error, discarded."""
    depths: Counter[int] = field(default_factory=Counter)
    """Cycles by depth."""
    drafted: Counter[int] = field(default_factory=Counter)
    """Drafts by place in the cycle, from 1."""
    accepted: Counter[int] = field(default_factory=Counter)
    drafter_tried: Counter[str] = field(default_factory=Counter)
    """First places drafted, by drafter."""
    drafter_right: Counter[str] = field(default_factory=Counter)
    cycle_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """Running mean by (rows, depth)."""
    stage_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage in the last cycle that was timed stage by stage."""

    def count_cycle(self, depth: int, trials: Sequence[CycleOutcome], *, has_head: bool) -> None:
        self.cycles += 1
        self.depths[depth] += 1
        for trial in trials:
            self._count_trial(trial, has_head=has_head)

    def time_cycle(self, rows: int, depth: int, seconds: float) -> None:
        known = self.cycle_s.get((rows, depth), seconds)
        self.cycle_s[rows, depth] = known + _CYCLE_WEIGHT * (seconds - known)

    def snapshot(self) -> dict[str, Any]:
        return {
            "cycles": self.cycles,
            "tokens": self.tokens,
            "prefill_tokens": self.prefill_tokens,
            "shared_tokens": self.shared_tokens,
            "joined": self.joined,
            "left": dict(self.left),
            "tokens_per_cycle": round(self.tokens / self.cycles, 3) if self.cycles else 0.0,
            "cycles_by_depth": {str(depth): count for depth, count in sorted(self.depths.items())},
            "drafted_by_place": [self.drafted[place] for place in sorted(self.drafted)],
            "accepted_by_place": [self.accepted[place] for place in sorted(self.drafted)],
            "drafters": {
                name: {"tried": tried, "right": self.drafter_right[name]}
                for name, tried in sorted(self.drafter_tried.items())
            },
            "cycle_ms": {
                f"{rows}x{depth}": round(seconds * 1e3, 3) for (rows, depth), seconds in sorted(self.cycle_s.items())
            },
            "stage_ms": {stage: round(seconds * 1e3, 3) for stage, seconds in self.stage_s.items()},
        }

    def _count_trial(self, trial: CycleOutcome, *, has_head: bool) -> None:
        for place in range(1, trial.depth + 1):
            self.drafted[place] += 1
            self.accepted[place] += place <= trial.accepted
        if trial.depth and (trial.is_by_lookup or has_head):
            name = "lookup" if trial.is_by_lookup else "head"
            self.drafter_tried[name] += 1
            self.drafter_right[name] += trial.accepted > 0
