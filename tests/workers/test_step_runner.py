"""Tasks beside each other, and a Redis that is away. Engine: none; Redis: none."""

from __future__ import annotations

import asyncio

import pytest

from broker.errors import BrokerUnavailableError
from harness.wait import PATIENCE_S
from workers.step_runner import StepRunner, persist


async def never() -> None:
    await asyncio.Event().wait()


async def at_once() -> None:
    return


async def broken() -> None:
    raise KeyError("broken")


class Away:
    """A step that Redis lets through after some tries."""

    def __init__(self, tries_in_vain: int = 2) -> None:
        self.tries = 0
        self._tries_in_vain = tries_in_vain

    async def __call__(self) -> None:
        self.tries += 1
        if self.tries <= self._tries_in_vain:
            raise BrokerUnavailableError("away")


async def test_first_says_that_the_work_came_first() -> None:
    assert await StepRunner().first(at_once(), never())


async def test_first_says_that_something_else_came_first() -> None:
    assert not await StepRunner().first(never(), at_once())


async def test_first_says_that_time_was_up() -> None:
    assert not await StepRunner().first(never(), timeout_s=0.0)


async def test_first_raises_what_its_work_raises() -> None:
    with pytest.raises(KeyError):
        await StepRunner().first(broken(), never())


async def test_first_raises_what_a_task_of_the_crew_failed_with() -> None:
    crew = StepRunner()
    crew.repeat("broken", broken)

    with pytest.raises(KeyError):
        await crew.first(never())

    await crew.dismiss_all()


async def test_first_raises_the_first_of_several_failures() -> None:
    crew = StepRunner()
    crew.fail(KeyError("first"))
    crew.fail(ValueError("second"))

    with pytest.raises(KeyError):
        await crew.first(at_once())


async def test_crew_repeats_a_step() -> None:
    crew, done = StepRunner(), asyncio.Event()
    turns = iter(range(1000))

    async def turn() -> None:
        await asyncio.sleep(0)
        if next(turns) == 5:
            done.set()

    crew.repeat("turn", turn)

    assert await crew.first(done.wait(), timeout_s=PATIENCE_S)
    await crew.dismiss_all()


async def test_crew_dismisses_one_task_and_forgets_it() -> None:
    crew = StepRunner()
    crew.repeat("never", never)

    await crew.dismiss("never")
    await crew.dismiss("never")


async def test_step_is_tried_until_redis_lets_it() -> None:
    step = Away()

    await persist(step)

    assert step.tries == 3


async def test_longest_wait_between_two_tries_can_be_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(delay_s: float) -> None:
        waits.append(delay_s)

    monkeypatch.setattr("workers.step_runner.asyncio.sleep", sleep)

    await persist(Away(tries_in_vain=9), retry_max_s=0.2)

    assert len(waits) == 9
    assert max(waits) == 0.2


async def test_crew_waits_out_a_redis_that_is_away() -> None:
    crew, step, done = StepRunner(), Away(), asyncio.Event()

    async def turn() -> None:
        await step()
        done.set()
        await never()

    crew.repeat("turn", turn)

    assert await crew.first(done.wait(), timeout_s=PATIENCE_S)
    await crew.dismiss_all()
