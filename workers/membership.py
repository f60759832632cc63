"""This worker's place in the registry: its id, its phase, heartbeats, and how it leaves. Decodes nothing.

The id names one incarnation. Once others have declared it dead it never comes back; the worker joins under a new one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from redis.asyncio import Redis

from broker import keys, tasks
from broker.connection.connect import translated
from broker.errors import WireError
from broker.former.running_rows import RunningRows
from broker.scripts import Registration, Scripts
from broker.wire import WIRE_VERSION, Assignment, Lane, ModelCard, encode
from workers.jobs import parse_seats

logger = logging.getLogger(__name__)


class Phase(StrEnum):
    """What a worker is doing; it accepts jobs while it serves only."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Offer:
    """What a worker has to offer, once it knows its model."""

    lane: Lane
    card: ModelCard
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Vitals:
    """What a heartbeat tells of a worker besides the engine's counters."""

    progress: int
    active: int
    """Rows here that are not paused."""
    paused: int = 0
    held: int = 0
    """Offline rows that gave way not long ago and do not again for a while. That a worker says so at all tells a
    former that it can pause rows."""


class Membership:
    """Registers, beats and leaves under one id at a time."""

    def __init__(self, name: str, commands: Redis, scripts: Scripts, *, new_id: Callable[[str], str]) -> None:
        self.id = ""
        self.phase = Phase.STARTING
        self._name = name
        self._commands = commands
        self._scripts = scripts
        self._rows = RunningRows(commands)
        self._new_id = new_id
        self._offer: Offer | None = None
        self._registrations: set[asyncio.Task[None]] = set()
        """Those under way."""

    async def join(self) -> None:
        """Register under a fresh id, with whatever is known by now."""
        self.id = self._new_id(self._name)
        await self._register()
        logger.info("registered as %s", self.phase, extra={"worker": self.id})

    async def advertise(self, offer: Offer) -> None:
        """Say what this worker serves, or will serve once it is loaded."""
        self._offer = offer
        await self._register()

    async def beat(self, vitals: Vitals, *, snapshot: Mapping[str, Any]) -> bool:
        """Say that it lives; False when it was declared dead."""
        changed: dict[str, str | int] = {**asdict(vitals), "phase": self.phase}
        changed |= {"accepting": self._accepting, "snapshot": json.dumps(snapshot)}
        if self._offer is None:
            return bool(await self._scripts.beat(self.id, changed))
        card = self._offer.card
        return bool(await self._scripts.beat(self.id, changed, model=card.model, tokenizer=card.tokenizer))

    async def strays(self, known: Collection[Assignment], *, has_reader: bool) -> list[Assignment]:
        """Seats that Redis counts as this worker's and nobody here decodes.

        There are some after Redis lost its last moments, with them an end that was written, and when a worker stops
        reading its jobs. With `has_reader` those still in the job stream are left out: they will be read.
        """
        with translated():
            pipe = self._commands.pipeline(transaction=True)
            pipe.hgetall(keys.rows(self.id))
            pipe.xrange(keys.jobs(self.id))
            rows, entries = await pipe.execute()
        seats = {Assignment(name.decode(), int(attempt)) for name, attempt in rows.items()}
        unread = {seat for _, fields in entries for seat in _seats(fields)} if has_reader else set()
        return sorted(seats - unread - set(known))

    async def hand_back(self, seats: Collection[Assignment], *, is_crash: bool) -> None:
        """Return requests to the line."""
        if not seats:
            return
        outcomes = await self._scripts.hand_back(self.id, list(seats), is_crash=is_crash)
        logger.info("handed back %d requests", len(outcomes), extra={"worker": self.id})

    async def leave(self, *, is_crash: bool) -> None:
        """Hand everything back and go off the registry; nothing may beat or join meanwhile."""
        if under_way := set(self._registrations):
            try:
                await asyncio.wait(under_way)
            finally:
                await tasks.end(*under_way)
        while seats := await self._scripts.retire(self.id):
            blamed = await self._rows.blamed(seats) if is_crash else frozenset()
            await self.hand_back([seat for seat in seats if seat.request_id in blamed], is_crash=True)
            await self.hand_back([seat for seat in seats if seat.request_id not in blamed], is_crash=False)

    @property
    def _accepting(self) -> int:
        return int(self.phase is Phase.SERVING)

    async def _register(self) -> None:
        """Goes on when whoever asked for it is cancelled: what was sent could come true after a goodbye."""
        registering = asyncio.create_task(self._scripts.register(self._registration()), name="worker-register")
        self._registrations.add(registering)
        registering.add_done_callback(self._registrations.discard)
        await asyncio.shield(registering)

    def _registration(self) -> Registration:
        fields: dict[str, str | int | bytes] = {"kind": "worker", "name": self._name, "host": socket.gethostname()}
        fields |= {
            "pid": os.getpid(),
            "wire": WIRE_VERSION,
            "phase": self.phase,
            "accepting": self._accepting,
            "held": 0,
        }
        if self._offer is None:
            return Registration(self.id, fields)
        lane, card = self._offer.lane, self._offer.card
        return Registration(
            daemon_id=self.id,
            fields={**fields, "lane": encode(lane)},
            # Set once and counted from then on, so not before the engine has said how many there are.
            free_rows=lane.decode_batch_max if self.phase is Phase.SERVING else None,
            free_tokens=(lane.token_budget or None) if self.phase is Phase.SERVING else None,
            model=card.model,
            card=encode(card),
            tokenizer=card.tokenizer,
            tokenizer_files=self._offer.tokenizer_files,
        )


def _seats(fields: Mapping[bytes, bytes]) -> list[Assignment]:
    try:
        return parse_seats(fields)
    except WireError:
        return []  # the job reader buries it
