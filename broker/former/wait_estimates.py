"""How long a newcomer will wait for a row: what waits before it, over how fast rows are given out. Pure.

The rate is measured while there are never enough rows, in tokens that requests may cost, the unit the queue is
bounded in. What fills rows that were empty says nothing about how fast they become free, and is not counted.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from broker.former.capacity import Waiting
from broker.former.windows import Beyond
from broker.wire import Priority

LOOK_MS = 100
"""How often at most: a look goes over everything that waits."""
WINDOW_MS = 60_000
"""What is older says nothing about now."""


@dataclass(slots=True)
class _Pace:
    """How fast the rows of one pool are given out."""

    began_ms: int | None = None
    """Since when there have not been enough; None while there are."""
    given: deque[tuple[int, int]] = field(default_factory=deque)
    """When and how many tokens, since then."""
    rate: float | None = None
    """Tokens per ms; the last that was measured stays until there is a better one."""

    def look(self, now_ms: int, *, given: int, waits: bool) -> None:
        if self.began_ms is None:
            self.began_ms = now_ms if waits else None
            return
        if given:
            self.given.append((now_ms, given))
        while len(self.given) > 1 and self.given[0][0] < now_ms - WINDOW_MS:
            self.began_ms, _ = self.given.popleft()
        if self.given:
            # Up to the last row that was given: rows of like length end together, and between such moments nothing
            # is given. But a lane that stands still must show.
            since_ms = max(self.given[-1][0] - self.began_ms, (now_ms - self.began_ms) / 2, 1)
            self.rate = sum(tokens for _, tokens in self.given) / since_ms
        if not waits:
            self.began_ms = None
            self.given.clear()


class WaitEstimates:
    """The estimates of one former."""

    def __init__(self) -> None:
        self._paces: defaultdict[str, _Pace] = defaultdict(_Pace)
        self._given: defaultdict[str, int] = defaultdict(int)
        self._ahead: dict[str, tuple[float, float]] = {}
        self._looked_ms: int | None = None

    def give(self, each: Waiting) -> None:
        """A request got a row."""
        self._given[lane_name(*each.pool_key)] += each.cost

    def look(self, waiting: Iterable[Waiting], *, now_ms: int, beyond: Iterable[Beyond] = ()) -> None:
        """Look at what still waits once rows were given out; `beyond` is what waits besides, unseen."""
        if self._looked_ms is not None and 0 <= now_ms - self._looked_ms < LOOK_MS:
            return
        self._looked_ms = now_ms
        interactive: defaultdict[str, float] = defaultdict(float)
        offline: defaultdict[str, float] = defaultdict(float)
        for each in waiting:
            (offline if each.is_offline else interactive)[lane_name(*each.pool_key)] += each.cost
        for unseen in beyond:
            (offline if unseen.is_offline else interactive)[lane_name(*unseen.pool_key)] += unseen.tokens
        self._ahead = {name: (interactive[name], offline[name]) for name in interactive.keys() | offline.keys()}
        for name in self._paces.keys() | self._ahead.keys() | self._given.keys():
            self._paces[name].look(now_ms, given=self._given[name], waits=name in self._ahead)
        self._given.clear()

    def estimates_ms(self) -> dict[str, dict[Priority, int]]:
        """By lane name and priority; an offline newcomer has both lines before it."""
        found: dict[str, dict[Priority, int]] = {}
        for name, pace in self._paces.items():
            interactive, offline = self._ahead.get(name, (0, 0))
            if pace.rate:
                found[name] = {
                    "interactive": round(interactive / pace.rate),
                    "offline": round((interactive + offline) / pace.rate),
                }
        return found


def lane_name(model: str, profile: str) -> str:
    """Whoever waits for this model and profile stands in one line."""
    return f"{model}:{profile}"
