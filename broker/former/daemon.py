"""The cohort former, a daemon: matches what waits with the free rows of the workers, and takes over from the dead.

Two may run: the scripts keep them right, a lease keeps one idle. Decisions are in `policy` and `liveness`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from broker import keys, tasks
from broker.connection.connect import connect, translated
from broker.connection.entrance import check_server, enter
from broker.errors import BrokerConfigError, BrokerError, BrokerUnavailableError
from broker.former.capacity import Waiting, WorkerState
from broker.former.clearing import Clearing
from broker.former.failover import Failover
from broker.former.fair_share import FairShare
from broker.former.policy import Cohort, FormingPlan, PolicyConfig, plan
from broker.former.preemption import BusyWorker, PreemptionRules, give_way, places_of
from broker.former.row_limits import RowLimits
from broker.former.running_rows import RunningRows
from broker.former.wait_estimates import WaitEstimates
from broker.former.waiting import WaitingQueue
from broker.heartbeats import Connection
from broker.registry import DaemonRecord, Load, Registry
from broker.scripts import Registration, Scripts
from broker.wire import WIRE_VERSION, new_id

logger = logging.getLogger(__name__)

RECONNECT_MIN_S, RECONNECT_MAX_S = 0.05, 1.0
BEATS_PER_LEASE = 5
LEADING_SHARE = 0.5
"""Share of a lease after which a silent former is followed by the next: too early costs nothing but idle work."""


@dataclass(frozen=True, slots=True)
class FormerConfig:
    """What one former is told."""

    redis_url: str
    policy: PolicyConfig = PolicyConfig()
    lease_s: float = 5.0
    """How long a heartbeat may stand still before its daemon is dead."""
    tick_s: float = 0.25
    """How long the former sleeps when nothing wakes it."""
    max_crashes: int = 3
    """Owners that may die with a request before it is given up."""
    wire: int = WIRE_VERSION
    """The highest wire version this former reads."""


@dataclass(slots=True)
class FormerCounts:
    """What one former has sent since its start; goes with its heartbeat."""

    cohorts: int = 0
    rows: int = 0
    cohort_sizes: Counter[int] = field(default_factory=Counter)
    """Cohorts by their number of rows."""

    def count(self, rows: int) -> None:
        if rows:
            self.cohorts += 1
            self.rows += rows
            self.cohort_sizes[rows] += 1

    def as_dict(self) -> dict[str, Any]:
        sizes = {str(size): count for size, count in sorted(self.cohort_sizes.items())}
        return {"cohorts": self.cohorts, "rows": self.rows, "cohort_sizes": sizes}


class Former:
    """Runs until `stop`; `step` is one round."""

    def __init__(
        self, config: FormerConfig, *, commands: Redis, blocking: Redis, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`blocking` is a client without socket time-out that nobody else uses; both stay the caller's to close."""
        self.id = new_id("former")
        self._config = config
        self._commands = commands
        self._blocking = blocking
        self._monotonic = monotonic
        self._scripts = Scripts(commands)
        self._registry = Registry(commands)
        self._rows = RunningRows(commands)
        self._line = WaitingQueue(commands, monotonic=monotonic, wire=config.wire)
        self._clearing = Clearing(commands, self._scripts, self._line)
        self._limits = RowLimits()
        self._takeover = Failover(
            commands, self._scripts, lease_s=config.lease_s, max_crashes=config.max_crashes, monotonic=monotonic
        )
        self._shares = FairShare()
        self._tally = FormerCounts()
        self._waits = WaitEstimates()
        self._connection: Connection | None = None
        self._may_have_suspects = True
        """Whether what runs must be read although nothing returned waits: nobody may join a suspect."""
        self._is_working = False
        self._is_registered = False
        self._next_beat_s = float("-inf")
        self._held_until_ms: int | None = None
        self._is_redis_away = False
        self._is_stopping = False
        self._woken = asyncio.Event()

    @property
    def is_working(self) -> bool:
        """Whether it holds the lease."""
        return self._is_working

    @property
    def is_behind(self) -> bool:
        """Whether another round has work at once, although nothing new has come."""
        return self._line.is_behind or self._clearing.is_behind

    async def run(self) -> None:
        """Work until `stop`; while Redis is away, wait for it."""
        listener = asyncio.create_task(self._listen(), name="former-wake")
        try:
            while not self._is_stopping:
                await self._round()
        finally:
            await tasks.end(listener)
            with suppress(BrokerUnavailableError):
                await self._leave()

    def stop(self) -> None:
        """End `run` after the round in progress."""
        self._is_stopping = True
        self._woken.set()

    async def step(self) -> int:
        """One round; returns how many rows were sent.

        Raises:
            BrokerUnavailableError: Redis is away; what this round had done stands, the rest is done by another.
        """
        now_s = self._monotonic()
        if now_s >= self._next_beat_s:
            await self._beat()
            self._note_connection(await self._takeover.watch(own_id=self.id))
            await self._hold_lease()
            self._next_beat_s = now_s + self._config.lease_s / BEATS_PER_LEASE
        if not self._is_working:
            return 0
        records = await self._registry.daemons()
        await self._takeover.act(records)
        return await self._form(records)

    async def form(self) -> int:
        """Give out free rows once, whoever holds the lease; returns how many rows were sent."""
        return await self._form(await self._registry.daemons())

    async def _round(self) -> None:
        self._woken.clear()
        try:
            await self.step()
            self._note_redis(is_away=False)
            delay_s = self._idle_s()
        except BrokerConfigError:
            raise
        except BrokerUnavailableError as error:
            self._note_redis(is_away=True, why=error)
            delay_s = self._start_anew()
        except Exception:
            logger.exception("a round of the former failed")
            delay_s = self._start_anew()
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._woken.wait()

    def _note_redis(self, *, is_away: bool, why: BrokerUnavailableError | None = None) -> None:
        if is_away and not self._is_redis_away:
            logger.warning("the former waits for Redis: %s", why)
        if self._is_redis_away and not is_away:
            logger.info("Redis is back; the former goes on")
        self._is_redis_away = is_away

    def _idle_s(self) -> float:
        if self.is_behind:
            return 0.0
        if self._held_until_ms is None:
            # Where nothing waits, whatever changes that wakes the former; the next heartbeat is all there is to do.
            until_beat_s = 0.0 if len(self._line) else self._next_beat_s - self._monotonic()
            return max(self._config.tick_s, until_beat_s)
        return min(self._config.tick_s, max(self._held_until_ms - self._line.now_ms, 1) / 1000)

    def _start_anew(self) -> float:
        """What was seen before an interruption proves nothing after it; returns the delay of the next try."""
        self._line.clear()
        self._limits.start_anew()
        self._takeover.start_anew()
        self._next_beat_s = float("-inf")
        # The others watch from when Redis is back: whoever tries again too late is dead before its first beat.
        return min(RECONNECT_MAX_S, self._config.lease_s / BEATS_PER_LEASE)

    async def _beat(self) -> None:
        snapshot = {**self._tally.as_dict(), "waits_ms": self._waits.estimates_ms()}
        news: dict[str, str | int] = {"working": int(self._is_working), "snapshot": json.dumps(snapshot)}
        if self._is_registered and await self._scripts.beat(self.id, news):
            return
        if self._is_registered:
            logger.warning("former %s was declared dead, or Redis was emptied; it registers anew", self.id)
            await self._scripts.retire(self.id)
            self.id = new_id("former")
        await check_server(self._commands)
        fields: dict[str, str | int | bytes] = {"kind": "former", "host": socket.gethostname()}
        fields |= {"pid": os.getpid(), "wire": self._config.wire}
        await self._scripts.register(Registration(self.id, fields))
        self._is_registered = True

    def _note_connection(self, connection: Connection) -> None:
        # Another run of Redis may have undone entries that were read; the client reconnects without a word.
        if connection != self._connection:
            self._line.clear()
        self._connection = connection

    async def _hold_lease(self) -> None:
        was_working = self._is_working
        self._is_working = await self._scripts.lease(self.id, int(self._config.lease_s * LEADING_SHARE * 1000))
        if was_working != self._is_working:
            logger.info("former %s %s", self.id, "works" if self._is_working else "stands by")
            self._line.clear()
            self._limits.start_anew()
            self._may_have_suspects = True

    async def _form(self, records: Sequence[DaemonRecord]) -> int:
        policy = self._config.policy
        workers = [record for record in records if record.kind == "worker" and record.lane is not None]
        await self._line.refresh()
        await self._clear(workers)
        planned = plan(
            self._line.waiting,
            await self._views(workers),
            now_ms=self._line.now_ms,
            config=policy,
            shares=self._shares,
            key_rows=(await self._registry.load()).key_rows if policy.rows_per_key else {},
        )
        self._held_until_ms = planned.wake_at_ms
        sent = sum([await self._send(cohort) for cohort in planned.cohorts])
        sent += await self._make_room()
        self._waits.look(self._line.waiting, now_ms=self._line.now_ms, beyond=self._line.beyond)
        return sent

    async def _clear(self, workers: Sequence[DaemonRecord]) -> None:
        """Take out what will never run."""
        self._limits.look(workers, now_s=self._monotonic())
        await self._clearing.bury_unreadable()
        await self._clearing.expire()
        await self._clearing.reject_too_long(self._limits)

    async def _make_room(self) -> int:
        """Interactive work that found no row takes the places of offline rows, which their worker pauses meanwhile."""
        unplaced = [each for each in self._line.waiting if not each.is_offline]
        if not unplaced or not (load := await self._registry.load()).requests.get("offline"):
            return 0
        policy = self._config.policy
        rules = PreemptionRules(self._line.now_ms, policy.offline_age_ms, policy.min_run_ms, policy.rows_per_key)
        crowds = await self._rows.crowds(await self._registry.workers())
        planned = plan(
            unplaced,
            [places_of(crowd, rules) for crowd in crowds],
            now_ms=self._line.now_ms,
            config=policy,
            shares=self._shares,
            key_rows=load.key_rows,
        )
        sent = sum([await self._send(cohort, over_younger_ms=policy.offline_age_ms) for cohort in planned.cohorts])
        await self._hand_back(_without(unplaced, planned), [_behind(crowd, planned) for crowd in crowds], rules, load)
        return sent

    async def _hand_back(
        self, unplaced: Sequence[Waiting], crowds: Sequence[BusyWorker], rules: PreemptionRules, load: Load
    ) -> None:
        """Where memory is short, or a worker cannot pause, offline rows return to the line."""
        yielded = give_way(unplaced, crowds, rules=rules, key_rows=load.key_rows)
        for row in yielded:
            await self._scripts.hand_back(row.worker_id, [row.seat], is_crash=False)
            extra = {"request_id": row.seat.request_id, "worker": row.worker_id, "attempt": row.seat.attempt}
            logger.debug("an offline row gives way", extra=extra)
        if yielded:
            with translated():  # else workers learn of it only when their step is over
                await self._commands.publish(keys.CONTROL, "yield")

    async def _views(self, workers: Sequence[DaemonRecord]) -> list[WorkerState]:
        """Workers for the policy. Reading what runs costs a round trip and matters only for suspects and shares."""
        is_shared = self._config.policy.offline_share < 1 and self._line.has_any(keys.WAIT_OFFLINE)
        has_returned = self._line.has_any(keys.WAIT_RETURNED)
        with_rows = is_shared or has_returned or self._may_have_suspects
        views = await self._rows.views(workers, with_rows=with_rows)
        if with_rows:
            self._may_have_suspects = has_returned or any(view.has_suspect for view in views)
        return views

    async def _send(self, cohort: Cohort, *, over_younger_ms: int | None = None) -> int:
        cohort_id, ids = new_id("cohort"), cohort.request_ids
        sent = await self._scripts.form(
            cohort.worker_id,
            cohort_id,
            ids,
            rows_per_key=self._config.policy.rows_per_key,
            wire=max(each.ticket.min_wire for each in cohort.waiting),
            over_younger_ms=over_younger_ms,
        )
        extra = {"cohort_id": cohort_id, "worker": cohort.worker_id}
        logger.debug("cohort %s: %d of %d rows to %s", cohort_id, len(sent), len(ids), cohort.worker_id, extra=extra)
        for each in cohort.waiting:
            if each.ticket.id in sent:
                self._waits.give(each)
            if each.ticket.id in sent and not each.is_returned:
                self._shares.charge(each.ticket.key_id, each.ticket.cost_tokens)
        self._tally.count(len(sent))
        self._line.drop(self._line.find(sent))
        for entry in self._line.find(request_id for request_id in ids if request_id not in sent):
            if await self._clearing.look_into(entry):
                self._woken.set()  # a row may have been kept for it
        return len(sent)

    async def _listen(self) -> None:
        """Be woken by whatever may have made a row or a request ready."""
        delay_s = RECONNECT_MIN_S
        while not self._is_stopping:
            with suppress(RedisError, BrokerError), translated():
                async with self._blocking.pubsub() as pubsub:
                    await cast("Any", pubsub.subscribe(keys.WAKE))
                    async for _ in pubsub.listen():
                        self._woken.set()
                        delay_s = RECONNECT_MIN_S
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, RECONNECT_MAX_S)

    async def _leave(self) -> None:
        """Go off the registry and let the next former start at once."""
        if self._is_working:
            await self._scripts.lease(self.id, 1)
            self._is_working = False
        if self._is_registered:
            await self._scripts.retire(self.id)
            self._is_registered = False


def _without(unplaced: Sequence[Waiting], planned: FormingPlan) -> list[Waiting]:
    placed = {each.ordinal for cohort in planned.cohorts for each in cohort.waiting}
    return [each for each in unplaced if each.ordinal not in placed]


def _behind(crowd: BusyWorker, planned: FormingPlan) -> BusyWorker:
    """The worker once it has what was sent to it."""
    sent = [each for cohort in planned.cohorts if cohort.worker_id == crowd.view.id for each in cohort.waiting]
    tokens = crowd.view.free_tokens
    view = replace(
        crowd.view,
        free_rows=crowd.view.free_rows - len(sent),
        free_tokens=None if tokens is None else tokens - sum(each.cost for each in sent),
    )
    return replace(crowd, view=view)


async def run_former(config: FormerConfig) -> None:
    """Form cohorts until SIGTERM or SIGINT; wait for Redis if it is away. Raises: see `entrance.enter`."""
    if not await enter(config.redis_url, who="the former"):
        return
    commands, blocking = connect(config.redis_url), connect(config.redis_url, blocking=True)
    former = Former(config, commands=commands, blocking=blocking)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, former.stop)
    try:
        await former.run()
    finally:
        await commands.aclose()
        await blocking.aclose()
