"""Who is alive: a pure watcher of heartbeat counters. It reads no clock and no Redis; its owner hands it both."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

LATE_SHARE = 0.5
"""A watcher that did not look for this share of a lease may have been away itself, and starts anew."""


@dataclass(slots=True)
class _Sighting:
    beat: int
    since_s: float


class Watcher:
    """Calls a daemon dead when its counter stood still for one lease, all of it seen over one unbroken connection."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._connection: Hashable = None
        self._looked_s: float | None = None
        self._sightings: dict[str, _Sighting] = {}

    def observe(
        self, beats: Mapping[str, int], *, asked_s: float, answered_s: float, connection: Hashable
    ) -> frozenset[str]:
        """The daemons that are dead by now.

        A counter was read at some moment between question and answer. A lease runs from the answer that first showed
        it to the question that shows it again, so a Redis that stood still in between counts for nobody's silence.

        Args:
            beats: heartbeat counter of every registered daemon.
            asked_s: the watcher's own monotonic clock before they were read.
            answered_s: and after.
            connection: differs whenever the beats were read over another connection, or from another Redis run.
        """
        if not self._is_unbroken(answered_s, connection):
            self._sightings.clear()
        self._looked_s, self._connection = answered_s, connection
        self._sightings = {daemon_id: self._see(daemon_id, beat, answered_s) for daemon_id, beat in beats.items()}
        return frozenset(
            daemon_id for daemon_id, seen in self._sightings.items() if asked_s - seen.since_s >= self._lease_s
        )

    def start_anew(self) -> None:
        """Forget what was seen: nobody is dead before another whole lease."""
        self._looked_s = None
        self._sightings.clear()

    def _is_unbroken(self, now_s: float, connection: Hashable) -> bool:
        if self._looked_s is None or connection != self._connection:
            return False
        return now_s - self._looked_s <= self._lease_s * LATE_SHARE

    def _see(self, daemon_id: str, beat: int, now_s: float) -> _Sighting:
        seen = self._sightings.get(daemon_id)
        return seen if seen is not None and seen.beat == beat else _Sighting(beat, now_s)
