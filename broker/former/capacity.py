"""The room that is left on the workers during one round of the policy: what fits where. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from broker.wire import Lane, Ticket

_by_cost = attrgetter("cost", "ordinal")


@dataclass(frozen=True, slots=True)
class Waiting:
    """One waiting request."""

    ticket: Ticket
    ordinal: int
    """Its place in line, given once by ACCEPT and kept over hand-backs."""
    accepted_ms: int
    crashes: int = 0
    committed: int = 0
    is_returned: bool = False
    # Derived once: a plan looks at every waiting request, ten thousand of them if need be.
    cost: int = field(init=False, repr=False, compare=False)
    is_offline: bool = field(init=False, repr=False, compare=False)
    pool_key: tuple[str, str] = field(init=False, repr=False, compare=False)
    """Model and profile."""
    line_key: tuple[bool, bool, str] = field(init=False, repr=False, compare=False)
    """Those with the same one stand in one line: offline, returned, API key."""

    def __post_init__(self) -> None:
        ticket, is_offline = self.ticket, self.ticket.priority == "offline"
        object.__setattr__(self, "cost", ticket.cost_tokens)
        object.__setattr__(self, "is_offline", is_offline)
        object.__setattr__(self, "pool_key", (ticket.model, ticket.profile))
        object.__setattr__(self, "line_key", (is_offline, self.is_returned, ticket.key_id))

    @property
    def is_suspect(self) -> bool:
        """An owner died with it. Until it has proven itself again, nobody joins it, so that a crash is its own."""
        return self.crashes > 0


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What the policy knows of an accepting worker."""

    id: str
    lane: Lane
    free_rows: int
    free_tokens: int | None = None
    offline_rows: int = 0
    has_suspect: bool = False
    unproven_rows: int = 0
    """Rows that may yet turn out to be what kills the worker."""


@dataclass(slots=True)
class WorkerCapacity:
    """The room that is left on one worker."""

    view: WorkerState
    free_rows: int
    free_tokens: int
    offline_left: int
    has_suspect: bool
    unproven_rows: int = 0
    is_held: bool = False
    """Kept for a suspect until the rows here have proven themselves."""
    taken: list[Waiting] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether a request that is no suspect may join."""
        return self.free_rows > 0 and not self.has_suspect and not self.is_held

    @property
    def largest(self) -> int:
        """Most tokens that one more request may cost."""
        return min(self.view.lane.max_context_tokens, self.free_tokens) if self.is_open else 0

    @property
    def fullness(self) -> float:
        return 1.0 - self.free_rows / max(self.view.lane.decode_batch_max, 1)

    def takes(self, each: Waiting, *, is_capped: bool = False) -> bool:
        if is_capped and self.offline_left <= 0:
            return False
        if each.is_suspect:
            return self.could_take(each) and not self.unproven_rows
        return each.cost <= self.largest and each.ticket.min_wire <= self.view.lane.wire

    def could_take(self, each: Waiting) -> bool:
        """Whether a suspect could come here, once every row has proven itself."""
        has_place = self.free_rows > 0 and not self.has_suspect and each.ticket.min_wire <= self.view.lane.wire
        return has_place and each.cost <= min(self.view.lane.max_context_tokens, self.free_tokens)

    def take(self, each: Waiting) -> None:
        self.taken.append(each)
        self.free_rows -= 1
        self.free_tokens -= each.cost
        self.offline_left -= each.is_offline
        self.has_suspect |= each.is_suspect
        self.unproven_rows += 1


@dataclass(slots=True)
class Pool:
    """The workers with free rows of one model and profile."""

    rooms: list[WorkerCapacity]
    largest: int
    longest: int = 0
    """Cost of the longest request that waits for this pool; matters only where contexts differ."""
    has_refused: bool = False

    @property
    def has_different_contexts(self) -> bool:
        return len({room.view.lane.max_context_tokens for room in self.rooms}) > 1

    def find(self, each: Waiting, *, is_capped: bool) -> WorkerCapacity | None:
        """The emptiest worker that takes it; while longer ones wait, the one with the least context goes first."""
        if each.cost > self.largest and not each.is_suspect:
            return None
        fitting = [room for room in self.rooms if room.free_rows and room.takes(each, is_capped=is_capped)]
        if len(fitting) < 2:
            return fitting[0] if fitting else None
        contexts = [room.view.lane.max_context_tokens for room in fitting]
        must_spare = self.longest > min(contexts)
        return min(fitting, key=lambda room: (must_spare and room.view.lane.max_context_tokens, room.fullness))

    def place(self, each: Waiting, *, is_capped: bool) -> bool:
        room = self.find(each, is_capped=is_capped)
        if room is None:
            self.has_refused = True
            if each.is_suspect:
                self._hold(each)
            return False
        room.take(each)
        self.largest = max(room.largest for room in self.rooms)
        return True

    def _hold(self, each: Waiting) -> None:
        """Let nobody new join where a suspect will soonest find proven rows only; one worker at a time."""
        able = [room for room in self.rooms if room.could_take(each)]
        if able and not any(room.is_held for room in self.rooms):
            min(able, key=lambda room: room.unproven_rows).is_held = True
            self.largest = max(room.largest for room in self.rooms)

    def deal_by_length(self) -> None:
        """Give like lengths to the same worker, each worker keeping its number of rows.

        Left alone when a row is empty though something was refused: dealing anew might have made room for it.
        """
        filled = [room for room in self.rooms if room.taken and not room.has_suspect and not room.is_held]
        has_idle = any(room.free_rows for room in self.rooms)
        if len(filled) < 2 or (self.has_refused and has_idle):
            return
        filled.sort(key=lambda room: room.view.lane.max_context_tokens)
        everything = iter(sorted((each for room in filled for each in room.taken), key=_by_cost))
        hands = [[next(everything) for _ in room.taken] for room in filled]
        fresh = [_deal(room, hand) for room, hand in zip(filled, hands, strict=True)]
        dealt = [room for room in fresh if room is not None]
        if len(dealt) == len(filled):
            self.rooms = [room for room in self.rooms if room not in filled] + dealt


def _deal(room: WorkerCapacity, hand: Sequence[Waiting]) -> WorkerCapacity | None:
    """The same room with another hand; None when it does not take it."""
    fresh = open_room(room.view, offline_left=0)
    for each in hand:
        if not fresh.takes(each):
            return None
        fresh.take(each)
    return fresh


def open_room(view: WorkerState, *, offline_left: int) -> WorkerCapacity:
    """All the room that a worker has."""
    free_tokens = view.lane.max_context_tokens * view.free_rows if view.free_tokens is None else view.free_tokens
    return WorkerCapacity(view, view.free_rows, free_tokens, offline_left, view.has_suspect, view.unproven_rows)
