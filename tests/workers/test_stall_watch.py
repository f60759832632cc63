"""When a step counts as one that never returns. Engine: none; Redis: none."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from harness.clock import FakeClock
from workers.errors import StalledError
from workers.stall_watch import StallWatch


@dataclass
class Still:
    """An engine that gets on only when told."""

    progress: int = 0
    is_waiting: bool = False


def watch_for(seconds: int, engine: Still, *, active: int = 1, moves: bool = False) -> None:
    clock = FakeClock()
    watch = StallWatch(10.0, late_s=3.0, clock=clock)
    for _ in range(seconds + 1):
        watch.check(engine, active=active)
        clock.advance(1.0)
        engine.progress += moves


def test_watch_raises_when_rows_are_active_and_nothing_moves() -> None:
    with pytest.raises(StalledError, match="1 rows are active"):
        watch_for(10, Still())


def test_watch_waits_for_the_whole_bound() -> None:
    watch_for(9, Still())


def test_watch_is_content_while_the_engine_moves() -> None:
    watch_for(100, Still(), moves=True)


def test_watch_is_content_while_no_row_is_active() -> None:
    watch_for(100, Still(), active=0)


def test_watch_is_content_while_the_engine_waits_for_redis() -> None:
    watch_for(100, Still(is_waiting=True))


def test_watch_starts_anew_when_the_whole_process_stood_still() -> None:
    clock = FakeClock()
    watch = StallWatch(10.0, late_s=3.0, clock=clock)
    watch.check(Still(), active=1)

    clock.advance(3600.0)

    watch.check(Still(), active=1)
