"""What was asked and what came of it; the judgement of a chaos run."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal[
    "finished",  # every token right, one proper end
    "left",  # the client left on purpose, what it saw was right
    "refused",  # 503 or 429 before acceptance
    "cut",  # the connection to a killed API process broke
    "poisoned",  # a deliberate poison request, given up as it must be
    "wrong",  # a token that is not the expected one, repeated, or missing before a proper end
    "error",  # an error event or status with no such excuse
    "silent",  # no end within the time-out
]


@dataclass(slots=True)
class Ledger:
    """Counts outcomes by kind of client; keeps a few words about each that is not excused."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    """What was broken and what went wrong, with the second at which it did."""
    started_s: float = field(default_factory=time.monotonic)

    def note(self, kind: str, outcome: Outcome, words: str = "") -> None:
        self.outcomes[kind, outcome] += 1
        if outcome in ("wrong", "error", "silent"):
            self.notes.append(f"{kind} {outcome}: {words}")
            self.tell(self.notes[-1])

    def tell(self, what: str) -> None:
        self.story.append(f"{time.monotonic() - self.started_s:6.1f} s  {what}")

    def count(self, *outcomes: Outcome) -> int:
        return sum(count for (_, outcome), count in self.outcomes.items() if outcome in outcomes)

    @property
    def requests(self) -> int:
        return sum(self.outcomes.values())

    @property
    def finished_share(self) -> float:
        """Of those without an excuse, how many finished."""
        excused = self.count("left", "refused", "cut", "poisoned")
        return self.count("finished") / max(self.requests - excused, 1)
