"""Fairness between API keys, by tokens: start-time fair queueing. Pure bookkeeping, kept by the working former."""

from __future__ import annotations

_KEYS_KEPT = 1024


class FairShare:
    """Who had how much so far, on a virtual clock that only counts tokens given out.

    A key that was away starts where the others are now: it neither saves up for later nor pays for its past.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._finish: dict[str, float] = {}

    def start(self, key_id: str) -> float:
        """When this key's next request starts; the smallest goes first."""
        return max(self._now, self._finish.get(key_id, 0.0))

    def charge(self, key_id: str, cost_tokens: int) -> None:
        """This key was given a request that may cost so many tokens."""
        self._now = self.start(key_id)
        self._finish[key_id] = self._now + cost_tokens
        if len(self._finish) > _KEYS_KEPT:
            self._forget()

    def _forget(self) -> None:
        """Keep what the half with most owes; the others are forgiven a little."""
        middle = sorted(self._finish.values())[len(self._finish) // 2]
        self._now = max(self._now, middle)
        self._finish = {name: finish for name, finish in self._finish.items() if finish > self._now}

    def copy(self) -> FairShare:
        """The same shares, free to be changed."""
        twin = FairShare()
        twin._now = self._now
        twin._finish = dict(self._finish)
        return twin
