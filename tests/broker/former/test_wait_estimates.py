"""How long a newcomer is told to wait, against queues whose real wait is known. Engine: none; no Redis."""

from __future__ import annotations

import random

from broker.former.capacity import Waiting
from broker.former.wait_estimates import WaitEstimates, lane_name
from broker.wire import Priority
from harness import factories as make

LANE = lane_name(make.MODEL, "balanced")
COST = 100


def waiting(count: int, *, priority: Priority = "interactive") -> list[Waiting]:
    ticket = make.ticket(prompt_tokens=COST - 16, priority=priority)
    return [make.waiting(ticket=ticket) for _ in range(count)]


def estimate(waits: WaitEstimates, priority: Priority = "interactive") -> int:
    return waits.estimates_ms()[LANE][priority]


def serve(waits: WaitEstimates, *, rows: int, service_ms: tuple[int, int], line: int, for_ms: int) -> tuple[float, int]:
    """Rows that serve an endless line of this length; returns the estimate and the last mean wait."""
    dice = random.Random(1)
    busy_until = [0] * rows
    waited: list[int] = []
    queue = [0] * (rows + line)
    for now_ms in range(0, for_ms, 10):
        for row in range(rows):
            if busy_until[row] <= now_ms:
                waited.append(now_ms - queue.pop(0))
                waits.give(waiting(1)[0])
                busy_until[row] = now_ms + dice.randint(*service_ms)
                if now_ms:
                    queue.append(now_ms)
        waits.look(waiting(len(queue)), now_ms=now_ms)
    last = waited[-rows:]
    return estimate(waits), sum(last) // len(last)


def test_waits_are_unknown_before_anything_was_measured() -> None:
    waits = WaitEstimates()

    waits.look(waiting(5), now_ms=0)

    assert waits.estimates_ms() == {}


def test_rows_that_were_empty_say_nothing_about_how_fast_rows_become_free() -> None:
    waits = WaitEstimates()

    for each in waiting(8):
        waits.give(each)
    waits.look(waiting(40), now_ms=0)

    assert waits.estimates_ms() == {}


def test_estimate_is_near_the_wait_when_all_requests_are_alike() -> None:
    told, real = serve(WaitEstimates(), rows=8, service_ms=(1000, 1000), line=40, for_ms=20_000)

    assert real / 2 <= told <= real * 2


def test_estimate_is_near_the_wait_when_requests_differ() -> None:
    told, real = serve(WaitEstimates(), rows=8, service_ms=(200, 1800), line=40, for_ms=20_000)

    assert real / 2 <= told <= real * 2


def test_estimate_counts_both_lines_for_an_offline_newcomer() -> None:
    waits = WaitEstimates()
    line = waiting(10) + waiting(30, priority="offline")

    waits.look(line, now_ms=0)
    waits.give(waiting(1)[0])
    waits.look(line, now_ms=1000)

    assert estimate(waits) == 10_000
    assert estimate(waits, "offline") == 40_000


def test_estimate_falls_to_nothing_when_nothing_waits() -> None:
    waits = WaitEstimates()
    serve(waits, rows=4, service_ms=(500, 500), line=10, for_ms=5000)

    waits.look([], now_ms=6000)

    assert estimate(waits) == 0


def test_estimate_after_a_pause_uses_the_rate_that_was_measured_last() -> None:
    waits = WaitEstimates()
    serve(waits, rows=4, service_ms=(500, 500), line=10, for_ms=5000)
    waits.look([], now_ms=6000)

    waits.look(waiting(8), now_ms=600_000)

    assert 500 <= estimate(waits) <= 2000


def test_estimate_grows_while_a_lane_stands_still() -> None:
    waits = WaitEstimates()
    serve(waits, rows=4, service_ms=(500, 500), line=10, for_ms=5000)
    before = estimate(waits)

    waits.look(waiting(10), now_ms=50_000)

    assert estimate(waits) > 2 * before
