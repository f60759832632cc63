"""One record for each cohort that came here: its size, how long it waited, how it ran, and how each of its rows ended.

Pure bookkeeping, no I/O but the log line. A record is closed exactly once, when the last of its rows has left this
worker, whatever took it away; prompts and answers are not in it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from workers.running_row import ActiveRow

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenCohort:
    """A cohort and what has become of its rows so far."""

    id: str
    here: set[str] = field(default_factory=set)
    """Rows that have not left, by their names in the engine."""
    ends: dict[str, str] = field(default_factory=dict)
    """How each of the others left: its finish reason or error code, `lost`, `handed_back`, `crashed`."""
    waited_s: float = 0.0
    """Longest time from acceptance to forming among its rows."""
    tokens: int = 0
    """Decoded here and committed."""
    min_width: int = 0
    max_width: int = 0

    def join(self, row: ActiveRow) -> None:
        self.here.add(row.id)
        self.waited_s = max(self.waited_s, row.age_s)

    def leave(self, row: ActiveRow, how: str) -> None:
        self.here.discard(row.id)
        self.ends[row.id] = how
        self.tokens += row.committed_here
        stats = row.stats
        if stats.cycles:
            self.min_width = min(self.min_width, stats.min_width) if self.max_width else stats.min_width
            self.max_width = max(self.max_width, stats.max_width)


class CohortLedger:
    """The cohorts that are here, and counters over those that were."""

    def __init__(self) -> None:
        self._open: dict[str, OpenCohort] = {}
        self._ended = self._rows = self._tokens = 0
        self._waited_s = 0.0
        self._ends: Counter[str] = Counter()

    def open(self, cohort_id: str, rows: Sequence[ActiveRow]) -> None:
        """Take rows in; a job that is read twice adds to the record it opened."""
        for row in rows:
            row.cohort = cohort_id
            self._open.setdefault(cohort_id, OpenCohort(cohort_id)).join(row)

    def leave(self, row: ActiveRow, how: str) -> None:
        """A row has left this worker; asked again, nothing happens."""
        cohort = self._open.get(row.cohort)
        if cohort is None or row.id not in cohort.here:
            return
        cohort.leave(row, how)
        if not cohort.here:
            del self._open[row.cohort]
            self._close(cohort)

    def snapshot(self) -> dict[str, Any]:
        return {
            "open": len(self._open),
            "ended": self._ended,
            "rows": self._rows,
            "tokens": self._tokens,
            "waited_s": round(self._waited_s, 3),
            "ends": dict(self._ends),
        }

    def _close(self, cohort: OpenCohort) -> None:
        self._ended += 1
        self._rows += len(cohort.ends)
        self._tokens += cohort.tokens
        self._waited_s += cohort.waited_s
        self._ends.update(cohort.ends.values())
        logger.info(
            "cohort of %d rows has ended: waited %.3f s, widths %d to %d, %d tokens, %s",
            len(cohort.ends),
            cohort.waited_s,
            cohort.min_width,
            cohort.max_width,
            cohort.tokens,
            ", ".join(f"{row_id} {how}" for row_id, how in sorted(cohort.ends.items())),
            extra={"cohort_id": cohort.id},
        )
