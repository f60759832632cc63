"""A worker whose every step a test takes itself: the scripted engine takes a step only when it is let."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, cast

from redis.asyncio import Redis

from broker import keys
from broker.scripts import DEFAULT_BOUNDS, Scripts, Submission
from broker.text.token_bytes import byte_table, text_of
from broker.wire import Assignment, Request, Sampling, Ticket, pack_tokens, seed_of
from harness.clock import FakeClock
from harness.redis_servers import InProcessServer, Server
from harness.wait import PATIENCE_S
from mtplx_core.engine import Engine, Geometry, Row
from mtplx_core.engines.scripted import Script, ScriptedEngine, StepWork, scripted_completion
from workers.config import ScriptConfig, WorkerConfig
from workers.daemon import Links, Worker
from workers.lane import ServedModel
from workers.scripted_lane import IDENTITY, ScriptedLane, encode_text, script_of, tokenizer_files

TABLE = byte_table(tokenizer_files()["tokenizer.json"]) or ()
CONFIG = WorkerConfig(redis_url="unused", name="w", engine="scripted", decode_batch_max=2, grace_s=5.0)


class Hang:
    """A step that does not return until it is released."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.released = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        self.released.wait(PATIENCE_S)


class FragileServer(InProcessServer):
    """fakeredis that can be away."""

    @contextmanager
    def away(self) -> Iterator[None]:
        self._server.connected = False
        try:
            yield
        finally:
            self._server.connected = True


class Gate:
    """A pace that lets steps through one by one, or all of them."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._is_open = threading.Event()

    def __call__(self, work: StepWork) -> None:
        while not self._is_open.is_set() and not self._permits.acquire(timeout=0.01):
            pass

    def let(self, steps: int) -> None:
        self._permits.release(steps)

    def open(self) -> None:
        self._is_open.set()


class GatedLane(ScriptedLane):
    """The scripted lane with a script and a pace of the test's own."""

    def __init__(self, geometry: Geometry, script: Script, gate: Gate) -> None:
        super().__init__(ScriptConfig(), geometry)
        self.script, self.gate, self.geometry = script, gate, geometry
        self.threads: list[str] = []
        self.gate_hang = threading.Event()
        self.load_error: Exception | None = None

    def describe(self) -> ServedModel:
        self.threads.append(threading.current_thread().name)
        return super().describe()

    def build(self) -> Engine:
        self.threads.append(threading.current_thread().name)
        if self.load_error is not None:
            raise self.load_error
        return ScriptedEngine(self.geometry, self.script, pace=self.gate, hang=self.gate_hang.wait)

    def release(self) -> None:
        self.threads.append(threading.current_thread().name)


class Rig:
    """One worker, its Redis, and shortcuts to what a test does to both."""

    def __init__(
        self, server: Server, client: Redis, *, config: WorkerConfig = CONFIG, script: Script | None = None
    ) -> None:
        self.server, self.client, self.scripts = server, client, Scripts(client)
        self.script = script or script_of(ScriptConfig())
        self.gate = Gate()
        self.clock = FakeClock()
        self.lane = GatedLane(config.geometry, self.script, self.gate)
        self._names = iter(range(100))
        self.links = Links(server.client(), server.client(blocking=True), clock=self.clock, new_id=self._new_id)
        self.worker = Worker(config, self.lane, self.links)

    async def open(self) -> None:
        """Start, register and load."""
        self.worker.service.start()
        await self.worker.enlist()
        await self.worker.load()

    async def close(self) -> None:
        self.gate.open()
        self.lane.gate_hang.set()
        await self.worker.close()
        await self.links.close()

    async def accept(self, text: str, max_tokens: int = 8, **request: Any) -> Request:
        """A request that waits; its id is its text."""
        prompt = encode_text(text)
        sampling = request.pop("sampling", Sampling(temperature=0.0))
        reply, timeout_ms = request.pop("reply", ""), request.pop("timeout_ms", 60_000)
        priority = request.pop("priority", "interactive")
        made = Request(text, IDENTITY, "balanced", pack_tokens(prompt), max_tokens, sampling, **request)
        ticket = Ticket(text, IDENTITY, "balanced", len(prompt), max_tokens, priority)
        submission = Submission(made, ticket, seed_of(text), reply, timeout_ms)
        await self.scripts.accept(submission, DEFAULT_BOUNDS)
        return made

    async def form(self, *request_ids: str, over_younger_ms: int | None = None) -> list[str]:
        """Send waiting requests to the worker."""
        worker_id = self.worker.membership.id
        return await self.scripts.form(worker_id, "c1", request_ids, over_younger_ms=over_younger_ms)

    async def run_requests(self, *texts: str, max_tokens: int = 8, **request: Any) -> None:
        """Requests accepted, formed and seated; nothing decoded."""
        for text in texts:
            await self.accept(text, max_tokens, **request)
        await self.form(*texts)
        await self.worker.take_jobs(block_ms=None)

    async def decode(self, steps: int = 1) -> None:
        """Let the engine take steps, and wait until they have been heard of."""
        wanted = self.worker.service.steps + steps
        self.gate.let(steps)
        await wait_until(lambda: self.worker.service.steps >= wanted)

    async def step(self, steps: int = 1) -> None:
        """Decode steps, each committed."""
        for _ in range(steps):
            await self.decode()
            await self.worker.committer.step()

    async def run_out(self) -> None:
        """Decode and commit until every row has ended."""
        self.gate.open()
        async with asyncio.timeout(PATIENCE_S):
            while len(self.worker.committer.rows):
                await self.worker.committer.wait_until_wanted()
                await self.worker.committer.step()

    async def count_active_rows(self) -> int:
        """Rows in the engine after one more step; counters are read between steps."""
        reading = asyncio.create_task(self.worker.service.snapshot())
        await asyncio.sleep(0)
        await self.decode()
        return int((await reading)["active_rows"])

    def expected(self, text: str, max_tokens: int = 8) -> tuple[int, ...]:
        return scripted_completion(Row("row", encode_text(text), max_tokens), self.script)

    def text(self, text: str, max_tokens: int = 8) -> bytes:
        """What the expected completion says."""
        return text_of(TABLE, self.expected(text, max_tokens))

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}-{next(self._names)}"


async def wait_until(condition: Callable[[], bool]) -> None:
    """Give the event loop and the engine's thread time until something holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def wait_until_async(condition: Callable[[], Awaitable[bool]]) -> None:
    """The same for a condition that asks Redis."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await asyncio.sleep(0.001)


async def wait_for_redis(client: Redis, key: str, field: str, value: bytes | None) -> None:
    """Wait until a hash has a field with this value; None: until it has none."""
    async with asyncio.timeout(PATIENCE_S):
        while await cast("Any", client.hget(key, field)) != value:
            await asyncio.sleep(0.001)


def seat(text: str, attempt: int = 1) -> Assignment:
    return Assignment(text, attempt)


@asynccontextmanager
async def opened(server: Server, client: Redis, *, script: Script | None = None, **changes: Any) -> AsyncIterator[Rig]:
    """A rig of the test's own making, with changes to its config."""
    rig = Rig(server, client, config=replace(CONFIG, **changes), script=script)
    try:
        await rig.open()
        yield rig
    finally:
        await rig.close()


@asynccontextmanager
async def serving(rig: Rig) -> AsyncIterator[asyncio.Task[None]]:
    """The rig's worker runs as it does in a process of its own; afterwards it is stopped."""
    running = asyncio.create_task(rig.worker.run())
    try:
        await wait_until_async(lambda: accepts(rig))
        yield running
    finally:
        rig.gate.open()
        rig.lane.gate_hang.set()
        rig.worker.stop()
        rig.worker.stop()
        await asyncio.wait([running], timeout=PATIENCE_S)
        await rig.links.close()
        if not running.cancelled():
            running.exception()


async def accepts(rig: Rig) -> bool:
    raw = await cast("Any", rig.client.hget(keys.daemon(rig.worker.membership.id), "accepting"))
    return bool(raw == b"1")
