"""The engine as asyncio sees it. Engine: scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from mtplx_core.engine import Geometry, Row, StepResult
from mtplx_core.engines.scripted import Script, ScriptedEngine, ScriptedFault
from tests.workers.rig import Hang, wait_until
from workers.errors import EngineFailedError
from workers.service import Service

GEOMETRY = Geometry(decode_batch_max=2, max_context_tokens=64)


class Notes:
    """A listener that writes down."""

    def __init__(self) -> None:
        self.steps: list[StepResult] = []
        self.rejects: list[tuple[str, str]] = []
        self.deaths: list[Exception] = []

    def on_step(self, result: StepResult) -> None:
        self.steps.append(result)

    def on_reject(self, row_id: str, message: str) -> None:
        self.rejects.append((row_id, message))

    def on_death(self, error: Exception) -> None:
        self.deaths.append(error)


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
async def service(notes: Notes) -> AsyncIterator[Service]:
    service = Service(notes, run_ahead_steps=3)
    service.start()
    yield service
    await service.shutdown()


def engine_of(script: Script | None = None, *, hang: Callable[[], object] | None = None) -> ScriptedEngine:
    return ScriptedEngine(GEOMETRY, script, hang=hang)


async def test_service_tells_its_listener_of_steps(service: Service, notes: Notes) -> None:
    await service.use(engine_of)

    service.submit(Row("a", (1,), 2))

    await wait_until(lambda: len(notes.steps) == 2)
    assert [end.reason for step in notes.steps for end in step.ends] == ["length"]
    assert service.steps == 2


async def test_service_tells_its_listener_of_a_refusal(service: Service, notes: Notes) -> None:
    await service.use(engine_of)

    service.submit(Row("a", (), 2))

    await wait_until(lambda: bool(notes.rejects))
    assert notes.rejects == [("a", "the prompt is empty")]


async def test_service_waits_once_it_has_run_ahead(service: Service, notes: Notes) -> None:
    await service.use(engine_of)
    service.submit(Row("a", (1,), 5))
    await wait_until(lambda: service.is_waiting)
    assert len(notes.steps) == 3

    service.acknowledge(3)

    await wait_until(lambda: len(notes.steps) == 5)
    assert not service.is_waiting


async def test_service_reads_the_engines_counters(service: Service) -> None:
    await service.use(engine_of)

    counters = await service.snapshot()

    assert (counters["mode"], counters["active_rows"]) == ("scripted", 0)


async def test_service_makes_progress_with_calls_and_steps(service: Service, notes: Notes) -> None:
    before = service.progress
    await service.use(engine_of)
    service.submit(Row("a", (1,), 2))

    await wait_until(lambda: len(notes.steps) == 2)

    assert service.progress == before + 3


async def test_service_raises_what_a_function_raised(service: Service) -> None:
    with pytest.raises(ZeroDivisionError):
        await service.call(lambda: 1 // 0)


async def test_service_fails_what_waits_when_the_engine_dies(service: Service, notes: Notes) -> None:
    hang = Hang()
    script = Script(faults=(ScriptedFault("hang", 0), ScriptedFault("dead", 0)))
    await service.use(lambda: engine_of(script, hang=hang))
    service.submit(Row("a", (1,), 2))
    await wait_until(hang.entered.is_set)
    waiting = asyncio.create_task(service.snapshot())
    await asyncio.sleep(0)

    hang.released.set()

    with pytest.raises(EngineFailedError, match="scripted death"):
        await waiting
    assert len(notes.deaths) == 1


async def test_service_refuses_calls_once_the_engine_is_dead(service: Service, notes: Notes) -> None:
    await service.use(lambda: engine_of(Script(faults=(ScriptedFault("dead", 0),))))
    service.submit(Row("a", (1,), 2))
    await wait_until(lambda: bool(notes.deaths))

    with pytest.raises(EngineFailedError):
        await service.snapshot()


async def test_service_forgets_an_answer_that_nobody_waits_for(service: Service) -> None:
    asking = asyncio.create_task(service.call(lambda: 1))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)

    assert await service.call(lambda: 2) == 2


async def test_service_says_whether_its_thread_has_ended(notes: Notes) -> None:
    service = Service(notes, run_ahead_steps=3)
    service.start()

    assert await service.shutdown()


async def test_service_says_that_its_thread_is_stuck(notes: Notes) -> None:
    hang = Hang()
    service = Service(notes, run_ahead_steps=3, join_s=0.01)
    service.start()
    await service.use(lambda: engine_of(Script(faults=(ScriptedFault("hang", 0),)), hang=hang))
    service.submit(Row("a", (1,), 2))
    await wait_until(hang.entered.is_set)

    assert not await service.shutdown()

    hang.released.set()
    assert await service.shutdown()
