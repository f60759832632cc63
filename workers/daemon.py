"""The worker daemon: takes jobs, has them decoded, commits their tokens, until it is told to stop.

Its steps are public, so that they can be driven without time: `enlist`, `load`, `take_jobs`, `committer.step`, `beat`,
`drain`. `run` repeats them, waits out a Redis that is away, and gives up when the engine does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from redis.asyncio import Redis

from broker import tasks
from broker.connection.connect import answered_within, connect
from broker.connection.entrance import check_server, enter
from broker.outage import SILENT_S
from broker.scripts import Scripts
from broker.wire import new_id
from mtplx_core.blas import load_blas
from mtplx_core.engine import SchedulerMode, StepResult
from workers.cancel_listener import ControlListener
from workers.committer import Committer
from workers.config import ScriptConfig, WorkerConfig
from workers.errors import EngineFailedError
from workers.jobs import JobReader, TokenDecoder
from workers.lane import LaneSource, card_of, lane_of, memory_of, place_rules_of, settled, token_budget_of, tongue_of
from workers.membership import Membership, Offer, Phase, Vitals
from workers.mlx_lane import MlxLane
from workers.row_scheduler import SchedulerRules
from workers.scripted_lane import ScriptedLane
from workers.service import Service
from workers.stall_watch import StallWatch
from workers.step_runner import StepRunner, persist

__all__ = ["Links", "ScriptConfig", "Worker", "WorkerConfig", "run_worker"]

logger = logging.getLogger(__name__)

BLOCK_MS = 1000
LEAVE_S = 5.0
"""How long a worker that ends tries to reach Redis for its goodbye."""
EXIT_STUCK = 70


@dataclass(frozen=True, slots=True)
class Links:
    """What a worker reaches the world with."""

    commands: Redis
    blocking: Redis
    """For reads that wait; without a socket time-out."""
    clock: Callable[[], float] = time.monotonic
    new_id: Callable[[str], str] = new_id

    async def close(self) -> None:
        await self.commands.aclose()
        await self.blocking.aclose()


class Worker:
    """One lane on one machine."""

    def __init__(self, config: WorkerConfig, source: LaneSource, links: Links) -> None:
        scripts = Scripts(links.commands)
        self.config = config
        self.committer = Committer(scripts, clock=links.clock)
        self.service = Service(self, run_ahead_steps=config.run_ahead_steps, farewell=source.release)
        self.membership = Membership(config.name, links.commands, scripts, new_id=links.new_id)
        self.is_stuck = False
        """Whether the engine's thread could not be ended: only the end of the process ends it."""
        self._source = source
        self._links = links
        self._reader = JobReader(links.commands, links.blocking, scripts)
        self._control = ControlListener(links.blocking, self.committer.wake)
        self._stall = StallWatch(config.stall_s, late_s=3 * config.beat_every_s, clock=links.clock)
        self._tongue = TokenDecoder(None, frozenset())
        self._rules: SchedulerRules | None = None
        self._memory: Mapping[str, int] = {}
        self._refusals: dict[str, str] = {}
        """Why modes that would have come first are not the lane's."""
        self._counters: Mapping[str, Any] = {}
        self._reading: asyncio.Task[Mapping[str, Any]] | None = None
        self._crew = StepRunner()
        self._stopping = asyncio.Event()
        self._hurrying = asyncio.Event()

    def stop(self) -> None:
        """Take no more jobs, finish what runs, leave. Called twice: hand back at once."""
        if self._stopping.is_set():
            self._hurrying.set()
        self._stopping.set()

    def on_step(self, result: StepResult) -> None:
        self.committer.on_step(result)

    def on_reject(self, row_id: str, message: str) -> None:
        self.committer.on_reject(row_id, message)

    def on_death(self, error: Exception) -> None:
        self._crew.fail(EngineFailedError(f"the engine has died: {error}"))

    async def run(self) -> None:
        """Serve until `stop`.

        Raises:
            EngineFailedError: the engine died; its requests were handed back.
            StalledError: a step did not return; its requests were handed back.
            EngineError: the model could not be loaded.
            BrokerConfigError: Redis may lose accepted requests.
        """
        self.service.start()
        try:
            if await self._crew.first(persist(self.enlist), self._stopping.wait()):
                self._crew.repeat("heartbeat", self._beat_in_time, retry_max_s=self.config.beat_every_s)
                await self._serve()
            await self.drain()
        except Exception as error:
            logger.error("giving up: %s", error, extra={"worker": self.membership.id})
            await self._say_goodbye(is_crash=True)
            raise
        finally:
            await self.close()

    async def enlist(self) -> None:
        """Check Redis and register, before anything is loaded."""
        await check_server(self._links.commands)
        await self.membership.join()

    async def load(self) -> None:
        """Load the model and accept jobs."""
        model = await self.service.call(self._source.describe)
        if self.config.mode is None and model.mtp_refusal:
            logger.warning("%s does not run on mtp_batch: %s", model.name, model.mtp_refusal, extra=self._where)
            self._refusals = {SchedulerMode.MTP_BATCH.value: model.mtp_refusal}
        self.config = config = settled(self.config, model)
        context = min(model.max_context_tokens, config.max_context_tokens)
        geometry = replace(config.geometry, max_context_tokens=context)
        card = card_of(model, geometry, config, created_s=int(time.time()))
        offer = Offer(lane_of(model, geometry, config, token_budget=config.token_budget), card, model.tokenizer_files)
        await persist(lambda: self.membership.advertise(offer))
        engine = await self.service.use(self._source.build)
        self._refusals |= self._source.refusals
        memory_bytes = config.memory_bytes or self._source.memory_bytes
        config = replace(config, mode=self._source.mode or config.mode, memory_bytes=memory_bytes)
        self._memory = memory_of(engine, config)
        self._tongue = await self.service.call(lambda: tongue_of(model))
        geometry, budget = engine.geometry, token_budget_of(engine, config)
        self._rules = place_rules_of(engine, config)
        self.committer.begin(self.membership.id, self.service, self._rules)
        lane = lane_of(model, geometry, config, token_budget=budget)
        self.membership.phase = Phase.SERVING
        offer = Offer(lane, card_of(model, geometry, config, created_s=card.created_s), model.tokenizer_files)
        await persist(lambda: self.membership.advertise(offer))
        logger.info("serving %s", lane.fingerprint, extra={"worker": self.membership.id})

    async def take_jobs(self, *, block_ms: int | None = BLOCK_MS) -> None:
        """Seat the rows of every job in the stream."""
        worker_id = self.membership.id
        for entry in await self._reader.read(worker_id, block_ms=block_ms):
            seats = await self._reader.seats(worker_id, entry)
            fresh = [seat for seat in seats if not self.committer.rows.has_seat(*seat)]
            rows = await self._reader.load(worker_id, fresh, self._tongue)
            if worker_id == self.membership.id:
                self.committer.cohorts.open(entry.cohort, rows)
                for row in rows:
                    self.committer.seat(row)
            await self._reader.delete(worker_id, entry)

    async def beat(self) -> None:
        """Say that this worker lives and how far it is; start over under a new id if it was declared dead.

        Raises:
            BrokerUnavailableError: Redis is away, or has not answered in time; a new try goes over another connection.
            StalledError: a step has not returned for too long.
        """
        self._stall.check(self.service, active=self.committer.rows.decoding)
        rows = self.committer.rows
        paused, held = rows.paused, self.committer.held
        vitals = Vitals(self.service.progress, active=len(rows) - paused, paused=paused, held=held)
        async with answered_within(self._beat_within_s):
            is_known = await self.membership.beat(vitals, snapshot=self._snapshot())
        if not is_known:
            await self._start_over()
        elif self.membership.phase is Phase.SERVING:
            async with answered_within(self._beat_within_s):
                await self.hand_back_strays(has_reader=True)
        self.committer.wake()  # deadlines and lost wake-ups reach rows in a long step this way

    async def hand_back_strays(self, *, has_reader: bool) -> None:
        """Return the requests that Redis believes to be here and that are not."""
        known = {row.seat for row in self.committer.rows}
        strays = await self.membership.strays(known, has_reader=has_reader)
        # What was seated since the question was asked is not in `known`; asking again is cheaper than a lock.
        await self.membership.hand_back(
            [seat for seat in strays if not self.committer.rows.has_seat(*seat)], is_crash=False
        )

    async def drain(self) -> None:
        """Stop accepting, let rows end within the grace period, hand the rest back, leave."""
        self.membership.phase = Phase.DRAINING
        if not self.membership.id:
            return
        await self._crew.dismiss("jobs")
        await self._crew.first(persist(self._stop_accepting), self._hurrying.wait(), timeout_s=LEAVE_S)
        ended, grace_s = self.committer.wait_until_empty(), self.config.grace_s
        if not await self._crew.first(ended, self._hurrying.wait(), timeout_s=grace_s):
            logger.warning("%d rows did not end in time", len(self.committer.rows), extra=self._where)
        self.committer.drop_all("handed_back")
        await self._say_goodbye(is_crash=False)

    @property
    def _beat_within_s(self) -> float:
        """How long a heartbeat may take: one that is not answered, and the next try, fit into a lease."""
        return max(2 * self.config.beat_every_s, SILENT_S)

    @property
    def _where(self) -> dict[str, str]:
        return {"worker": self.membership.id}

    async def _serve(self) -> None:
        if not await self._crew.first(self.load(), self._stopping.wait()):
            return
        self._crew.repeat("jobs", self.take_jobs)
        self._crew.repeat("commits", self._commit_when_wanted)
        self._crew.repeat("control", self._control.step)
        await self._crew.first(self._stopping.wait())

    async def _stop_accepting(self) -> None:
        await self.beat()
        await self.hand_back_strays(has_reader=False)

    async def _start_over(self) -> None:
        logger.warning("declared dead: every row is dropped", extra=self._where)
        self.committer.drop_all("lost")
        if self.membership.phase is not Phase.DRAINING:
            await self.membership.join()
            if self._rules is not None:
                self.committer.begin(self.membership.id, self.service, self._rules)

    async def _say_goodbye(self, *, is_crash: bool) -> None:
        """Hand back what Redis believes to be here; after a crash first commit and finish what is whole."""
        self.membership.phase = Phase.DRAINING
        await self._crew.dismiss("commits")
        try:
            async with asyncio.timeout(LEAVE_S):
                if is_crash:
                    await persist(self.committer.step)
                await self._crew.dismiss("heartbeat")  # it would take a goodbye for a death, and start over
                await persist(lambda: self.membership.leave(is_crash=is_crash))
        except TimeoutError:
            logger.warning("Redis did not hear the goodbye; others will find out", extra=self._where)

    def _snapshot(self) -> Mapping[str, Any]:
        """The engine's counters as of its last answer: a heartbeat never waits for a step."""
        reading = self._reading
        if reading is not None and reading.done() and not reading.cancelled() and reading.exception() is None:
            self._counters = reading.result()
        if reading is None or reading.done():
            self._reading = asyncio.create_task(self.service.snapshot(), name="worker-snapshot")
        committer = self.committer
        return {
            **self._counters,
            "commits": committer.commits,
            "tokens_committed": committer.tokens_committed,
            "paused_rows": committer.rows.paused,
            "cohorts": committer.cohorts.snapshot(),
            "memory": self._memory,
            **{f"{mode}_refused": reason for mode, reason in self._refusals.items()},
        }

    async def _beat_in_time(self) -> None:
        await self.beat()
        await asyncio.sleep(self.config.beat_every_s)  # after a beat that was heard; another is tried again sooner

    async def _commit_when_wanted(self) -> None:
        await self.committer.wait_until_wanted()
        await self.committer.step()

    async def close(self) -> None:
        """End every task and the engine's thread, whatever they are at."""
        await self._crew.dismiss_all()
        self.committer.rows.clear("crashed")  # after a drain nothing is left
        await self._control.close()
        if self._reading is not None:
            await tasks.end(self._reading)
        self.is_stuck = not await self.service.shutdown()


async def run_worker(config: WorkerConfig) -> None:
    """Run one worker until SIGTERM or SIGINT; the second signal hands running rows back at once.

    Raises: see `Worker.run` and `broker.connection.entrance.enter`.
    """
    if not await enter(config.redis_url, who="the worker"):
        return
    source = _source(config)
    links = Links(connect(config.redis_url), connect(config.redis_url, blocking=True))
    worker = Worker(config, source, links)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    status = EXIT_STUCK
    try:
        await worker.run()
        status = 0
    finally:
        await links.close()
        if worker.is_stuck:
            _end_process(status)


def _source(config: WorkerConfig) -> LaneSource:
    if config.engine == "scripted":
        return ScriptedLane(config.script, config.geometry)
    logger.info("matrix products: %s", load_blas())
    return MlxLane(config)


def _end_process(status: int) -> None:
    """End without the usual clean-up, which would wait for the thread that is stuck."""
    logger.error("the engine's thread is stuck in a step; the process ends without it")
    logging.shutdown()
    os._exit(status)
