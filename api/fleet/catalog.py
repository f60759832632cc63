"""Which models there are, who serves them, and how long a prompt may be: a cached picture of the registry."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec
from msgspec import structs

from api.errors import BadRequestError, BusyError, ModelNotFoundError
from api.fleet.backend import Backend, Fleet
from api.openai.schemas import DefaultSampling, Model
from broker import tasks
from broker.errors import BrokerError, BrokerUnavailableError
from broker.former.wait_estimates import lane_name
from broker.liveness import Watcher
from broker.registry import DaemonRecord
from broker.wire import ModelCard, Priority

logger = logging.getLogger(__name__)

DEFAULT_PROFILE = "balanced"
STALE_AGES = 5
"""How many times its age a picture may be used while the next is taken: a busy process must not wait for itself."""
PATIENCE_S = 3.0
"""How long anybody waits for a picture of the registry."""
SILENT_S = 60.0
"""How long a heartbeat may stand still: many leases, so that a former's word on who is dead comes first."""
SILENT_LEASES = 3
"""And at least so many leases, where they are long."""
LOOKS = 6
"""Pictures taken in that time even though nobody asks: beats that are seen too seldom prove nothing."""
NAMESAKES = 4
"""Identities of a name, beside the one it stands for now, under which an earlier call is looked for."""
_ANY_FORMER = ""
"""No daemon's id: that of all formers as one."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request for a model goes."""

    card: ModelCard
    profile: str
    max_context_tokens: int


class _Waits(msgspec.Struct, frozen=True):
    """The part of a former's snapshot that is read here."""

    waits_ms: Mapping[str, Mapping[str, float]] = {}


_waits_decoder = msgspec.json.Decoder(_Waits)


class SilenceMonitor:
    """Sees who has fallen silent. Without a former nobody else does; and whether there is one is seen here, too."""

    def __init__(self, silent_s: float) -> None:
        self._watcher = Watcher(silent_s)
        self._former_beats: Mapping[str, int] = {}
        self._moves = 0
        """How often any former was seen to beat."""

    def feel(self, fleet: Fleet, *, asked_s: float, answered_s: float) -> Fleet:
        """The picture with what its beats say; see `Watcher.observe` for the times."""
        former_beats = {daemon.id: daemon.beat for daemon in fleet.formers}
        self._moves += any(self._former_beats.get(name) != beat for name, beat in former_beats.items())
        self._former_beats = former_beats
        beats = {daemon.id: daemon.beat for daemon in fleet.daemons if daemon.kind in ("worker", "former")}
        silent = self._watcher.observe(
            beats | {_ANY_FORMER: self._moves}, asked_s=asked_s, answered_s=answered_s, connection=None
        )
        return replace(fleet, silent=silent - {_ANY_FORMER}, has_former=_ANY_FORMER not in silent)

    def start_anew(self) -> None:
        """Redis was away: nobody is known to be silent."""
        self._watcher.start_anew()


class Catalog:
    """Answers from a picture at most `age_s` old; an unknown name is looked up afresh."""

    def __init__(
        self,
        backend: Backend,
        *,
        age_s: float,
        lane_grace_s: float,
        stall_s: float,
        silent_s: float = SILENT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._age_s = age_s
        self._grace_ms = lane_grace_s * 1000
        self._clock = clock
        self._fleet = Fleet()
        self._taken = -1e9
        self._stalls = Watcher(stall_s / 2)
        self.stalled: frozenset[str] = frozenset()
        """Workers seen with active rows and without progress for too long."""
        self._pulse = SilenceMonitor(silent_s)
        self._look_every_s = silent_s / LOOKS
        self._refresh: asyncio.Task[Fleet] | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def last(self) -> Fleet:
        """The picture as it was last taken, however old."""
        return self._fleet

    async def fleet(self, *, is_fresh: bool = False) -> Fleet:
        """The picture; a fresh one is waited for, otherwise one that is a little old is answered at once and renewed.

        Raises:
            BrokerUnavailableError: there is none young enough, and Redis gives none.
        """
        age_s = self._clock() - self._taken
        if age_s <= self._age_s and not is_fresh:
            return self._fleet
        if not self._backend.is_connected:
            self._pulse.start_anew()
            raise BrokerUnavailableError("Redis does not answer")
        refresh = self._renew()
        if age_s <= self._age_s * STALE_AGES and not is_fresh:
            return self._fleet
        try:
            async with asyncio.timeout(PATIENCE_S), self._backend.while_answering():
                return await asyncio.shield(refresh)  # others may wait for the same picture
        except TimeoutError as error:
            raise BrokerUnavailableError("Redis does not answer") from error

    def look_on(self) -> None:
        """From now on take a picture now and then though nobody asks, until `close`: beats are to be watched."""
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._look_for_ever(), name="registry-watch")

    async def close(self) -> None:
        """Look on no more, and wait for a picture that is being taken."""
        if self._watch is not None:
            await tasks.end(self._watch)
        if self._refresh is not None:
            await asyncio.wait({self._refresh})

    def _renew(self) -> asyncio.Task[Fleet]:
        """The picture that is being taken, begun now where there is none."""
        if self._refresh is None or self._refresh.done():
            self._refresh = asyncio.create_task(self._take(), name="registry-picture")
            self._refresh.add_done_callback(_look_at)
        return self._refresh

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._look_every_s)
            if self._backend.is_connected:
                await asyncio.wait({self._renew()})

    async def _take(self) -> Fleet:
        asked_s = self._clock()
        try:
            picture = await self._backend.fleet()
        except BrokerError:
            self._pulse.start_anew()
            raise
        self._taken = self._clock()
        self._fleet = self._pulse.feel(picture, asked_s=asked_s, answered_s=self._taken)
        progress = {worker.id: worker.progress for worker in self._fleet.workers if worker.active_rows}
        self.stalled = self._stalls.observe(progress, asked_s=asked_s, answered_s=self._taken, connection=None)
        return self._fleet

    async def route(self, name: str, profile: str | None) -> Route:
        """Raises: ModelNotFoundError, BusyError, BadRequestError, BrokerUnavailableError."""
        fleet = await self.fleet()
        card = find(fleet, name)
        if card is None or not self.is_served(fleet, card):
            fleet = await self.fleet(is_fresh=True)
            card = find(fleet, name)
        if card is None:
            raise ModelNotFoundError(name)
        if not self.is_served(fleet, card):
            raise BusyError(f"No worker serves {name!r} at the moment.", code="no_worker", retry_after_s=5)
        return _route(fleet, card, profile)

    def namesakes(self, card: ModelCard) -> list[Route]:
        """Where a call of this model's name may have gone at another time, whether or not anybody serves it now."""
        fleet = self._fleet
        others = [each for each in fleet.cards.values() if each.name == card.name and each.model != card.model]
        others.sort(key=lambda each: fleet.last_seen_ms.get(each.model, 0), reverse=True)
        return [_route(fleet, each, None) for each in others[:NAMESAKES]]

    def is_served(self, fleet: Fleet, card: ModelCard) -> bool:
        """Whether a new request for this model may queue: it has a worker, or had one a moment ago."""
        if any(is_loading(worker) for worker in serving(fleet, card)):
            return True
        seen_ms = fleet.last_seen_ms.get(card.model)
        return seen_ms is not None and fleet.now_ms - seen_ms <= self._grace_ms

    def wait_s(self, route: Route, priority: Priority) -> float | None:
        """How long a newcomer will wait for a row, as the working former said last; None when it cannot say."""
        name = lane_name(route.card.model, route.profile)
        for former in self._fleet.formers:
            if former.fields.get("working") == "1":
                return estimated_wait_s(former.fields.get("snapshot", ""), name, priority)
        return None

    async def models(self) -> list[Model]:
        """One entry a name, the ones that may be asked for now first. Raises: BrokerUnavailableError."""
        fleet = await self.fleet()
        names = sorted({card.name for card in fleet.cards.values()})
        found = [card for name in names if (card := find(fleet, name)) is not None]
        return [_describe(fleet, card) for card in found]

    async def model(self, name: str) -> Model:
        """Raises: ModelNotFoundError, BrokerUnavailableError."""
        fleet = await self.fleet()
        if find(fleet, name) is None:
            fleet = await self.fleet(is_fresh=True)
        card = find(fleet, name)
        if card is None:
            raise ModelNotFoundError(name)
        return _describe(fleet, card)


def estimated_wait_s(snapshot: str, name: str, priority: Priority) -> float | None:
    """What a former's snapshot says of a lane."""
    try:
        said = _waits_decoder.decode(snapshot)
    except msgspec.MsgspecError:
        return None
    wait_ms = said.waits_ms.get(name, {}).get(priority)
    return None if wait_ms is None else wait_ms / 1000


def find(fleet: Fleet, name: str) -> ModelCard | None:
    """The card with this identity, or the one of this name that was served last."""
    if (exact := fleet.cards.get(name)) is not None:
        return exact
    named = [card for card in fleet.cards.values() if card.name == name]
    return max(named, key=lambda card: (fleet.last_seen_ms.get(card.model, 0), card.model), default=None)


def default_sampling(card: ModelCard) -> DefaultSampling:
    """What holds for this model where a request leaves a field out."""
    said = structs.asdict(card.defaults)
    return DefaultSampling(**{name: value for name, value in said.items() if value is not None})


def _look_at(refresh: asyncio.Task[Fleet]) -> None:
    """A picture that nobody waited for may fail; the next one will say so to whoever asks."""
    if not refresh.cancelled() and (error := refresh.exception()) is not None:
        logger.debug("no picture of the registry: %s", error)


def serving(fleet: Fleet, card: ModelCard) -> list[DaemonRecord]:
    return [worker for worker in fleet.workers if worker.lane is not None and worker.lane.model == card.model]


def is_loading(worker: DaemonRecord) -> bool:
    return worker.fields.get("phase") == "starting"


def _route(fleet: Fleet, card: ModelCard, profile: str | None) -> Route:
    lanes = [worker.lane for worker in serving(fleet, card) if worker.lane is not None]
    profiles = {lane.profile for lane in lanes} or {DEFAULT_PROFILE}
    if profile is not None and profile not in profiles:
        raise BadRequestError(
            f"numerics_profile {profile!r} is not served for this model; served: {', '.join(sorted(profiles))}.",
            param="numerics_profile",
        )
    chosen = profile or (DEFAULT_PROFILE if DEFAULT_PROFILE in profiles else min(profiles))
    fitting = [lane.row_tokens_max for lane in lanes if lane.profile == chosen]
    return Route(card, chosen, max(fitting, default=card.max_context_tokens))


def _describe(fleet: Fleet, card: ModelCard) -> Model:
    lanes = [worker.lane for worker in serving(fleet, card) if worker.lane is not None]
    return Model(
        id=card.name,
        created=card.created_s,
        max_context_tokens=max((lane.row_tokens_max for lane in lanes), default=card.max_context_tokens),
        profiles=sorted({lane.profile for lane in lanes}),
        identity=card.model,
        default_sampling_params=default_sampling(card),
    )
