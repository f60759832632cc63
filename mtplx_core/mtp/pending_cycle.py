"""One cycle between its start and the reading of its result, and what it tells of the cost of such a cycle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from mtplx_core.mtp.cycle import accepted_of
from mtplx_core.mtp.device_batch import CyclePlan, Started
from mtplx_core.mtp.slots import Slot

_WAITED_SHARE = 0.05


class SlotOutcome(NamedTuple):
    """What a cycle made of one slot."""

    chosen: list[int]
    """The plain choice at every position."""
    accepted: int
    """Drafts that equal it, counted to the first that does not."""
    is_finite: bool
    has_lookup: bool
    """Whether prompt lookup found something."""
    is_lookup_right: bool
    """Whether the first token of it was the plain choice."""


@dataclass(slots=True, eq=False)
class PendingCycle:
    """A cycle on the device whose result the host has not read."""

    seats: list[tuple[int, Slot]]
    plan: CyclePlan
    started: Started
    follows: bool
    """Whether nothing was given to the device between the cycle before and it."""
    begun_s: float
    """When building it began."""
    keys: int
    """That all rows together attend to."""

    def read(self) -> list[SlotOutcome]:
        """By slot; waits for the device."""
        started, found = self.started, self.plan.guesses or {}
        chosen: Any = started.chosen.tolist()  # the one wait of a cycle
        drafts: Any = started.drafts.tolist()
        finite: Any = started.finite.tolist()
        looked: Any = started.guessed.tolist() if started.guessed is not None else None
        guessed = looked or [found[slot][0] if slot in found else -1 for slot in range(len(chosen))]
        return [
            SlotOutcome(tokens, accepted_of(drafted, tokens), is_finite, guess >= 0, guess == tokens[0])
            for tokens, drafted, is_finite, guess in zip(chosen, drafts, finite, guessed, strict=True)
        ]

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
