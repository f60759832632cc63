"""One cycle between its start and the reading of its result, and what it tells of the cost of such a cycle."""

from __future__ import annotations

from dataclasses import dataclass

from mtplx_core.device_batch import Started
from mtplx_core.seats import Seat

_WAITED_SHARE = 0.05


@dataclass(slots=True, eq=False)
class Flight:
    """A cycle on the device whose result the host has not read."""

    seats: list[tuple[int, Seat]]
    width: int
    depth: int
    started: Started
    follows: bool
    """Whether nothing was given to the device between the cycle before and it."""
    head_depth: int
    """Drafts of the rows in which lookup found nothing."""
    begun_s: float
    """When building it began."""

    def took_s(self, asked_s: float, read_s: float, *, last_read_s: float | None) -> float | None:
        """What such a cycle takes; None where this one does not tell, since the device or the host was held up.

        Args:
            asked_s: when the host began to wait for the result.
            read_s: when it had it.
            last_read_s: the same of the cycle before, where this one was built beside it. It then took from one reading
                to the next, if the host waited for it: else that is the host's own time. In turn it is from building to
                reading.
        """
        if not self.follows:
            return None
        if last_read_s is None:
            return read_s - self.begun_s
        took_s = read_s - last_read_s
        return took_s if read_s - asked_s > _WAITED_SHARE * took_s else None
