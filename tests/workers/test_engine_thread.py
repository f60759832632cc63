"""The engine's thread by itself: commands in, deliveries out. Engine: scripted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, TypeVar

import pytest

from harness.wait import PATIENCE_S
from mtplx_core.engine import Geometry, Row
from mtplx_core.engines.scripted import Script, ScriptedEngine, ScriptedFault, scripted_completion
from mtplx_core.errors import EngineDeadError
from tests.workers.rig import Hang
from workers.engine_thread import Delivery, Died, EngineThread, FunctionAnswer, Rejected, Stepped

T = TypeVar("T")

GEOMETRY = Geometry(decode_batch_max=2, max_context_tokens=64)


class Driver:
    """A thread and what it has delivered."""

    def __init__(self, *, run_ahead_steps: int = 100) -> None:
        self.deliveries: SimpleQueue[Delivery] = SimpleQueue()
        self.last_words: list[str] = []
        self.thread = EngineThread(
            self.deliveries.put,
            run_ahead_steps=run_ahead_steps,
            farewell=lambda: self.last_words.append(threading.current_thread().name),
        )
        self.thread.start()

    def use(self, script: Script | None = None, *, hang: Callable[[], object] | None = None) -> None:
        self.thread.use(0, lambda: ScriptedEngine(GEOMETRY, script, hang=hang))
        self.next(FunctionAnswer)

    def next(self, kind: type[T]) -> T:
        delivery = self.deliveries.get(timeout=PATIENCE_S)
        assert isinstance(delivery, kind), delivery
        return delivery

    def tokens(self, count: int) -> list[int]:
        """The tokens of the next deliveries, until there are so many."""
        tokens: list[int] = []
        while len(tokens) < count:
            for row in self.next(Stepped).result.tokens:
                tokens += row.tokens
        return tokens

    def end(self) -> None:
        self.thread.close()
        assert self.thread.join(PATIENCE_S)


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.end()


def row(name: str = "a", *, max_tokens: int = 5) -> Row:
    return Row(name, (1, 2, 3), max_tokens)


def test_thread_decodes_a_row_to_its_end(driver: Driver) -> None:
    driver.use()

    driver.thread.admit(row())

    assert driver.tokens(5) == list(scripted_completion(row(), Script()))


def test_thread_wakes_for_a_row_after_it_had_nothing_to_do(driver: Driver) -> None:
    driver.use()
    driver.thread.admit(row("a"))
    driver.tokens(5)

    driver.thread.admit(row("b"))

    assert len(driver.tokens(5)) == 5


class Idling(ScriptedEngine):
    """Has some pieces of work for a time without rows, and notes how many rows there are at each."""

    def __init__(self) -> None:
        super().__init__(GEOMETRY)
        self.pieces = 3
        self.rows: list[int] = []
        self.done: SimpleQueue[None] = SimpleQueue()

    def idle(self) -> bool:
        self.rows.append(self.active_rows)
        self.pieces -= 1
        if self.pieces == 0:
            self.done.put(None)
        return self.pieces > 0


def test_thread_lets_an_engine_without_rows_work_and_admits_rows_as_ever(driver: Driver) -> None:
    engine = Idling()
    driver.thread.use(0, lambda: engine)
    driver.next(FunctionAnswer)

    engine.done.get(timeout=PATIENCE_S)
    driver.thread.call(1, lambda: setattr(engine, "pieces", 2))
    driver.next(FunctionAnswer)
    driver.thread.admit(row())
    assert len(driver.tokens(5)) == 5
    engine.done.get(timeout=PATIENCE_S)
    driver.thread.call(2, lambda: list(engine.rows))

    assert driver.next(FunctionAnswer).value == [0] * 5


def test_thread_runs_functions_before_there_is_an_engine(driver: Driver) -> None:
    driver.thread.call(7, lambda: threading.current_thread().name)

    assert driver.next(FunctionAnswer) == FunctionAnswer(7, "engine", None)


def test_thread_hands_back_what_a_function_raises(driver: Driver) -> None:
    driver.thread.call(7, lambda: 1 // 0)

    answered = driver.next(FunctionAnswer)

    assert isinstance(answered.error, ZeroDivisionError)


def test_thread_lives_on_when_an_engine_cannot_be_built(driver: Driver) -> None:
    driver.thread.use(1, lambda: ScriptedEngine(GEOMETRY, 1 // 0))  # type: ignore[arg-type]  # never gets that far
    assert driver.next(FunctionAnswer).error is not None

    driver.use()
    driver.thread.admit(row())

    assert len(driver.tokens(5)) == 5


def test_thread_tells_of_a_row_that_the_engine_will_not_take(driver: Driver) -> None:
    driver.use()

    driver.thread.admit(row(max_tokens=1000))

    assert driver.next(Rejected).row_id == "a"


def test_thread_stops_a_row_that_is_discarded() -> None:
    driver = Driver(run_ahead_steps=1)
    driver.use()
    driver.thread.admit(row())
    driver.next(Stepped)

    driver.thread.discard("a")
    driver.thread.acknowledge(1)
    driver.thread.snapshot(9)

    assert driver.next(FunctionAnswer).value["active_rows"] == 0
    driver.end()


def test_thread_waits_when_it_has_run_ahead_and_goes_on_when_steps_are_acknowledged() -> None:
    driver = Driver(run_ahead_steps=2)
    driver.use()
    driver.thread.admit(row())
    driver.tokens(2)
    driver.thread.call(1, lambda: None)
    driver.next(FunctionAnswer)

    driver.thread.acknowledge(2)

    assert len(driver.tokens(2)) == 2
    driver.end()


def test_thread_answers_with_no_counters_before_there_is_an_engine(driver: Driver) -> None:
    driver.thread.snapshot(3)

    assert driver.next(FunctionAnswer) == FunctionAnswer(3, {}, None)


def test_thread_dies_with_its_engine_and_says_why() -> None:
    driver = Driver()
    driver.use(Script(faults=(ScriptedFault("dead", 1),)))

    driver.thread.admit(row())
    driver.next(Stepped)

    assert isinstance(driver.next(Died).error, EngineDeadError)
    assert driver.thread.join(PATIENCE_S)
    assert driver.last_words == ["engine"]


def test_thread_says_goodbye_on_itself_when_it_is_closed() -> None:
    driver = Driver()
    driver.use()

    driver.end()

    assert driver.last_words == ["engine"]


def test_thread_does_nothing_more_once_it_is_closed() -> None:
    driver = Driver()
    driver.use()

    driver.thread.close()
    driver.thread.call(1, lambda: None)

    assert driver.thread.join(PATIENCE_S)
    assert driver.deliveries.empty()


def test_thread_that_is_stuck_in_a_step_does_not_join() -> None:
    hang = Hang()
    driver = Driver()
    driver.use(Script(faults=(ScriptedFault("hang", 0),)), hang=hang)
    driver.thread.admit(row())
    assert hang.entered.wait(PATIENCE_S)

    driver.thread.close()

    assert not driver.thread.join(0.05)
    hang.released.set()
    assert driver.thread.join(PATIENCE_S)


def test_thread_ends_when_nobody_can_hear_it_any_more() -> None:
    def nobody(delivery: Delivery) -> Any:
        raise RuntimeError("the event loop is closed")

    thread = EngineThread(nobody, run_ahead_steps=1, farewell=lambda: None)
    thread.start()

    thread.call(1, lambda: None)

    assert thread.join(PATIENCE_S)
