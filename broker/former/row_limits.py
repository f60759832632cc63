"""How long a row the workers of each model offer, so that a request which no worker can run is told at once. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from broker.former.capacity import Waiting
from broker.registry import DaemonRecord

SETTLE_S = 10.0
"""How long a former looks on before it calls a request too long: workers may be on their way back, as it is itself."""
REMEMBER_S = 600.0
"""How long the longest row counts after its worker has left: the worker may come back."""

PoolKey = tuple[str, str]


@dataclass(slots=True)
class _Longest:
    tokens: int
    seen_s: float


class RowLimits:
    """The longest rows that one former has seen."""

    def __init__(self) -> None:
        self._longest: dict[PoolKey, _Longest] = {}
        self._served: frozenset[PoolKey] = frozenset()
        self._since_s: float | None = None
        self._is_settled = False

    def start_anew(self) -> None:
        """Nothing was seen for a while."""
        self._longest.clear()
        self._since_s = None

    def look(self, workers: Iterable[DaemonRecord], *, now_s: float) -> None:
        """Look at all registered workers, those that are starting or leaving too."""
        self._since_s = now_s if self._since_s is None else self._since_s
        self._is_settled = now_s - self._since_s >= SETTLE_S
        served: set[PoolKey] = set()
        for record in workers:
            if record.lane is None:
                continue
            pool_key = (record.lane.model, record.lane.profile)
            if record.is_accepting and not record.is_dead:
                served.add(pool_key)
            self._note(pool_key, record.lane.row_tokens_max, now_s)
        self._served = frozenset(served)

    def limit_of(self, each: Waiting) -> int | None:
        """The tokens of the longest row for a request that is longer; None when it may find one."""
        if not self._is_settled or each.pool_key not in self._served:
            return None
        tokens = self._longest[each.pool_key].tokens
        return tokens if each.cost > tokens else None

    def _note(self, pool_key: PoolKey, tokens: int, now_s: float) -> None:
        longest = self._longest.get(pool_key)
        if longest is None or tokens >= longest.tokens or now_s - longest.seen_s > REMEMBER_S:
            self._longest[pool_key] = _Longest(tokens, now_s)
