"""The watcher of "Who is alive", on a clock that is a number. Engine: none; Redis: none."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.liveness import Watcher

HERE = ("run", 1)


def watch(watcher: Watcher, *looks: tuple[float, int]) -> list[bool]:
    """Whether w1 is dead at each look, given (time, its counter)."""
    return [
        "w1" in watcher.observe({"w1": beat}, asked_s=now_s, answered_s=now_s, connection=HERE) for now_s, beat in looks
    ]


def test_watcher_calls_nobody_dead_when_counters_move() -> None:
    assert watch(Watcher(2.0), *((float(i), i) for i in range(20))) == [False] * 20


def test_watcher_calls_a_daemon_dead_when_its_counter_stood_still_for_a_lease() -> None:
    assert watch(Watcher(2.0), (0, 5), (1, 5), (2, 5)) == [False, False, True]


def test_watcher_counts_a_lease_from_when_it_saw_the_counter_first() -> None:
    assert watch(Watcher(2.0), (0, 5), (1, 6), (2, 6), (2.9, 6), (3, 6)) == [False, False, False, False, True]


def test_watcher_starts_anew_when_the_connection_was_another() -> None:
    watcher = Watcher(2.0)
    watch(watcher, (0, 5), (1, 5))

    assert not watcher.observe({"w1": 5}, asked_s=2.0, answered_s=2.0, connection=("run", 2))
    assert not watcher.observe({"w1": 5}, asked_s=3.0, answered_s=3.0, connection=("run", 2))
    assert watcher.observe({"w1": 5}, asked_s=4.0, answered_s=4.0, connection=("run", 2)) == {"w1"}


def test_watcher_starts_anew_when_redis_was_started_again() -> None:
    watcher = Watcher(2.0)
    watch(watcher, (0, 5), (1, 5))

    assert not watcher.observe({"w1": 5}, asked_s=2.0, answered_s=2.0, connection=("another run", 1))


def test_watcher_starts_anew_when_it_was_late_itself() -> None:
    assert watch(Watcher(2.0), (0, 5), (1, 5), (2.5, 5), (3.5, 5), (4.5, 5)) == [False, False, False, False, True]


def test_watcher_counts_no_time_in_which_the_answer_was_awaited() -> None:
    watcher = Watcher(2.0)
    watcher.observe({"w1": 5}, asked_s=0.0, answered_s=0.9, connection=HERE)
    watcher.observe({"w1": 5}, asked_s=1.8, answered_s=1.9, connection=HERE)

    assert not watcher.observe({"w1": 5}, asked_s=2.8, answered_s=2.9, connection=HERE)
    assert watcher.observe({"w1": 5}, asked_s=2.9, answered_s=3.0, connection=HERE) == {"w1"}


def test_watcher_starts_anew_when_an_answer_took_long() -> None:
    watcher = Watcher(2.0)
    watch(watcher, (0, 5), (1, 5))

    assert not watcher.observe({"w1": 5}, asked_s=2.0, answered_s=2.5, connection=HERE)


def test_watcher_starts_anew_when_it_is_told_so() -> None:
    watcher = Watcher(2.0)
    watch(watcher, (0, 5), (1, 5))

    watcher.start_anew()

    assert watch(watcher, (2, 5), (3, 5), (4, 5)) == [False, False, True]


def test_watcher_forgets_a_daemon_that_left_in_between() -> None:
    watcher = Watcher(2.0)
    watch(watcher, (0, 5))
    watcher.observe({}, asked_s=1.0, answered_s=1.0, connection=HERE)

    assert watch(watcher, (2, 5), (3, 5), (4, 5)) == [False, False, True]


def test_watcher_calls_a_counter_that_went_back_alive() -> None:
    assert watch(Watcher(2.0), (0, 5), (1, 5), (2, 3)) == [False, False, False]


def test_watcher_tells_daemons_apart() -> None:
    watcher = Watcher(2.0)
    for now_s in (0.0, 1.0):
        watcher.observe({"w1": 5, "w2": int(now_s)}, asked_s=now_s, answered_s=now_s, connection=HERE)

    assert watcher.observe({"w1": 5, "w2": 2, "w3": 0}, asked_s=2.0, answered_s=2.0, connection=HERE) == {"w1"}


@settings(deadline=None)
@given(gaps=st.lists(st.floats(0.01, 3.0), max_size=30), breaks=st.sets(st.integers(0, 29)))
def test_watcher_needs_a_whole_unbroken_lease_for_every_death(gaps: list[float], breaks: set[int]) -> None:
    watcher, now_s, connection, unbroken_s = Watcher(2.0), 0.0, 0, 0.0
    watcher.observe({"w1": 1}, asked_s=now_s, answered_s=now_s, connection=connection)

    for i, gap in enumerate(gaps):
        now_s += gap
        connection += i in breaks
        unbroken_s = 0.0 if gap > 1.0 or i in breaks else unbroken_s + gap
        dead = watcher.observe({"w1": 1}, asked_s=now_s, answered_s=now_s, connection=connection)

        assert not dead or unbroken_s >= 2.0 - 1e-6
