"""When Redis counts as silent, and who is told. Engine: none; no Redis either."""

from __future__ import annotations

import asyncio

import pytest

from broker.errors import BrokerUnavailableError
from broker.outage import LATE_TICKS, TICK_S, OutageWatch


def ask_in_vain(watch: OutageWatch, seconds: float) -> None:
    """A question that nobody answers, and that fails in the end."""
    with watch.asking():
        tick_for(watch, seconds)
        raise BrokerUnavailableError("no answer")


async def wait_in_vain(watch: OutageWatch, seconds: float) -> None:
    """Work under the guard while Redis says nothing for so long."""
    async with watch.guard():
        with watch.asking():
            tick_for(watch, seconds)
            await asyncio.Event().wait()


def tick_for(watch: OutageWatch, seconds: float) -> None:
    for _ in range(round(seconds / TICK_S)):
        watch.tick(TICK_S)


def test_watch_calls_redis_silent_when_a_question_stays_open() -> None:
    watch = OutageWatch(silent_s=1.0)

    with watch.asking():
        tick_for(watch, 0.9)
        assert not watch.is_silent
        tick_for(watch, 0.2)
        assert watch.is_silent


def test_watch_does_not_count_while_nobody_asks() -> None:
    watch = OutageWatch(silent_s=1.0)

    tick_for(watch, 5.0)

    assert not watch.is_silent


def test_watch_starts_anew_with_every_answer() -> None:
    watch = OutageWatch(silent_s=1.0)

    with watch.asking():
        tick_for(watch, 0.9)
        with watch.asking():
            pass
        tick_for(watch, 0.9)

    assert not watch.is_silent


def test_watch_does_not_take_its_own_standstill_for_silence() -> None:
    watch = OutageWatch(silent_s=1.0)

    with watch.asking():
        watch.tick(3600.0)
        assert not watch.is_silent
        tick_for(watch, 1.0 - LATE_TICKS * TICK_S)
        assert watch.is_silent


def test_failed_question_proves_nothing() -> None:
    watch = OutageWatch(silent_s=1.0)

    with pytest.raises(BrokerUnavailableError):
        ask_in_vain(watch, 2.0)

    assert watch.is_silent


async def test_guard_ends_what_waits_when_redis_falls_silent() -> None:
    watch = OutageWatch(silent_s=1.0)

    with pytest.raises(BrokerUnavailableError):
        await wait_in_vain(watch, 1.5)


async def test_guard_refuses_at_once_while_redis_is_silent() -> None:
    watch = OutageWatch(silent_s=1.0)
    with pytest.raises(BrokerUnavailableError):
        ask_in_vain(watch, 1.5)
    entered = False

    with pytest.raises(BrokerUnavailableError):
        async with watch.guard():
            entered = True

    assert not entered


async def test_guard_passes_other_time_outs_on() -> None:
    watch = OutageWatch()

    with pytest.raises(TimeoutError):
        async with watch.guard():
            raise TimeoutError("of the work itself")


async def test_guard_leaves_alone_what_has_ended() -> None:
    watch = OutageWatch(silent_s=1.0)
    async with watch.guard():
        pass

    with watch.asking():
        tick_for(watch, 2.0)

    await asyncio.sleep(0)
