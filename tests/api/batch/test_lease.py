"""A runner that loses its batch while results wait to be written. Engine: none; Redis: fakeredis, its outages acted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from api.batch.file_store import FileStore, content_path
from api.batch.lease import BatchLease, LeaseLostError
from api.batch.lines import LineRules
from api.batch.parts import LineCounts, Parts
from api.batch.progress import BatchProgress, Tools
from api.batch.runner import BatchRunner, RunnerLimits
from api.calls.client import TextClient
from api.errors import ApiError
from broker import keys
from broker.batches import BatchDesk, BatchRecord
from broker.errors import BrokerConfigError, BrokerUnavailableError
from broker.wire import Cause
from harness.redis_servers import InProcessServer
from harness.wait import PATIENCE_S, wait_until
from tests.offline.batch_files import jsonl, line

BATCH = "batch-1"
ENDPOINT = "/v1/completions"
FIELDS: dict[str, str | int] = {
    "key_id": "",
    "endpoint": ENDPOINT,
    "input_file_id": "file-1",
    "completion_window": "1h",
}
LEASE_S = 0.4
RULES = LineRules(ENDPOINT, 10, 1000)
TURNS = 50
"""Rounds of the loop after which every task has done what it can without time passing."""


class Outage:
    """Keeps a runner from Redis while it lasts."""

    def __init__(self) -> None:
        self.is_on = False

    @contextlib.asynccontextmanager
    async def guard(self) -> AsyncIterator[None]:
        if self.is_on:
            raise BrokerUnavailableError("Redis is away")
        yield


class Calls:
    """Stands for the text client: the first call runs until the test has it fail, the others have no end."""

    catalog = None

    def __init__(self) -> None:
        self.submitted = 0
        self._code = ""
        self._over = asyncio.Event()

    async def submit(self, *_: object) -> Any:
        self.submitted += 1
        whole = self._whole if self.submitted == 1 else asyncio.Event().wait
        return SimpleNamespace(whole=whole, cancel=self._ignore, job=SimpleNamespace(works=[]))

    def fail(self, code: str) -> None:
        self._code = code
        self._over.set()

    async def _whole(self) -> None:
        await self._over.wait()
        raise ApiError("It failed.", code=self._code)

    async def _ignore(self, cause: Cause) -> None: ...


@pytest_asyncio.fixture
async def client() -> AsyncIterator[Redis]:
    client = InProcessServer().client()
    yield client
    await client.aclose()


@pytest.fixture
def desk(client: Redis) -> BatchDesk:
    return BatchDesk(client)


@pytest.fixture
def outage() -> Outage:
    return Outage()


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    store = FileStore(str(tmp_path))
    store.write(content_path("file-1"), jsonl([line("a"), line("b")]))
    return store


@pytest.fixture
def tools(client: Redis, outage: Outage, calls: Calls, store: FileStore) -> Tools:
    """What the runner under test works with."""
    return Tools(cast("TextClient", calls), BatchDesk(client, guard=outage.guard), store)


@pytest_asyncio.fixture
async def record(desk: BatchDesk) -> BatchRecord:
    """A batch that was validated and is nobody's."""
    await desk.new_batch(BATCH, FIELDS, window_s=3600, keep_s=60)
    await desk.move(BATCH, "in_progress", come_from=["validating"], fields={"total": 2})
    record = await desk.batch(BATCH)
    assert record is not None
    return record


async def until(condition: Callable[[], bool], what: str) -> None:
    async def is_true() -> bool:
        return condition()

    await wait_until(is_true, what)


async def settle() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def begun(runner: BatchRunner, calls: Calls) -> asyncio.Task[str]:
    """A runner that waits for the answers to its lines."""
    running: asyncio.Task[str] = asyncio.create_task(runner.run())
    await until(lambda: calls.submitted == 2, "the lines are submitted")
    return running


async def until_free(client: Redis) -> None:
    async def is_free() -> bool:
        return await client.exists(keys.batch_lease(BATCH)) == 0

    await wait_until(is_free, "the lease ran out")


async def end_of(running: asyncio.Task[str]) -> str:
    async with asyncio.timeout(PATIENCE_S):
        return await running


@pytest.mark.parametrize("is_emptied", [False, True], ids=["another-has-it", "redis-was-emptied"])
async def test_runner_halted_in_an_outage_ends_without_writing_once_its_batch_is_lost(
    record: BatchRecord,
    tools: Tools,
    desk: BatchDesk,
    client: Redis,
    outage: Outage,
    calls: Calls,
    store: FileStore,
    is_emptied: bool,
) -> None:
    running = await begun(BatchRunner(record, tools, RunnerLimits(lease_s=LEASE_S), runner="first"), calls)
    outage.is_on = True
    await until_free(client)
    if is_emptied:
        await client.flushall()
    else:
        await desk.beat(BATCH, "second", lease_ms=60_000, fields={})
    calls.fail("deadline_exceeded")
    await settle()

    outage.is_on = False

    assert await end_of(running) == "lost"
    assert store.list(f"batches/{BATCH}") == []


async def test_runner_told_to_stop_in_an_outage_leaves_its_results_to_the_next(
    record: BatchRecord, tools: Tools, client: Redis, outage: Outage, calls: Calls, store: FileStore
) -> None:
    runner = BatchRunner(record, tools, RunnerLimits(lease_s=LEASE_S), runner="first")
    running = await begun(runner, calls)
    outage.is_on = True
    await until_free(client)
    calls.fail("engine")
    await settle()

    runner.stop()

    assert await end_of(running) == "stopped"
    assert store.list(f"batches/{BATCH}") == []


async def test_runner_told_to_stop_writes_what_it_has(
    record: BatchRecord, tools: Tools, calls: Calls, store: FileStore
) -> None:
    runner = BatchRunner(record, tools, RunnerLimits(lease_s=60), runner="first")
    running = await begun(runner, calls)
    calls.fail("engine")
    await settle()

    runner.stop()

    assert await end_of(running) == "stopped"
    assert len(store.list(f"batches/{BATCH}")) == 1


async def test_errors_for_lines_left_are_not_written_for_a_batch_that_is_lost(
    record: BatchRecord, tools: Tools, store: FileStore
) -> None:
    lease = BatchLease(tools.desk, BATCH, "first", lease_s=LEASE_S)
    progress = BatchProgress(record, tools, Parts(store, BATCH, "first"), LineCounts(), lease)
    giving_up = asyncio.create_task(progress.give_up(RULES))
    await settle()

    lease.halt("lost")

    with pytest.raises(LeaseLostError):
        async with asyncio.timeout(PATIENCE_S):
            await giving_up
    assert store.list(f"batches/{BATCH}") == []


async def test_nobody_is_sure_of_a_lost_batch_however_lately_it_was_confirmed(
    record: BatchRecord, tools: Tools
) -> None:
    lease = BatchLease(tools.desk, BATCH, "first", lease_s=60)
    await lease.beat({})
    await lease.be_sure()

    lease.halt("lost")

    with pytest.raises(LeaseLostError):
        await lease.be_sure()


async def test_lost_lease_wakes_whoever_waits_to_be_sure(
    record: BatchRecord, desk: BatchDesk, tools: Tools, client: Redis
) -> None:
    lease = BatchLease(tools.desk, BATCH, "first", lease_s=LEASE_S)
    waiting = asyncio.create_task(lease.be_sure())
    await desk.beat(BATCH, "second", lease_ms=60_000, fields={})

    async with asyncio.timeout(PATIENCE_S):
        await lease.beat_for_ever(dict)
        with pytest.raises(LeaseLostError):
            await waiting

    assert lease.why == "lost"


async def test_lease_is_beaten_on_after_trouble_of_every_kind(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = BatchLease(tools.desk, BATCH, "first", lease_s=0.01)
    answers: list[Exception | bool] = [BrokerConfigError("Redis refused the password"), ValueError("odd"), False]

    async def beat(fields: Mapping[str, str | int]) -> bool:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(lease, "beat", beat)
    async with asyncio.timeout(PATIENCE_S):
        await lease.beat_for_ever(dict)

    assert (answers, lease.why) == ([], "lost")
