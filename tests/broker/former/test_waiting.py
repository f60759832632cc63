"""The former's copy of the waiting streams. Engine: none; Redis: all three servers."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
from redis.asyncio import Redis

from broker import keys
from broker.former.waiting import RELOAD_S, WaitingQueue
from broker.scripts import DEFAULT_BOUNDS, Scripts
from broker.wire import encode
from harness import factories as make
from harness.clock import FakeClock
from harness.running import accept, run_rows

Fields = dict[bytes, bytes]


@pytest.fixture
def waiting_line(client: Redis, clock: FakeClock) -> WaitingQueue:
    return WaitingQueue(client, monotonic=clock)


def ids(waiting_line: WaitingQueue) -> list[str]:
    return [each.ticket.id for each in waiting_line.waiting]


def fields(**changed: bytes | None) -> Fields:
    """A waiting entry as ACCEPT writes it, with some fields changed or left out."""
    entry: dict[str, bytes | None] = {
        "id": b"r1",
        "ordinal": b"1",
        "ticket": encode(make.ticket("r1")),
        "accepted_ms": b"1",
        "deadline_ms": b"99999999999999",
        "crashes": b"0",
        "committed": b"0",
    }
    return {name.encode(): value for name, value in (entry | changed).items() if value is not None}


async def add(client: Redis, entry: Fields) -> None:
    await cast("Any", client).xadd(keys.WAIT_INTERACTIVE, entry)


async def test_line_reads_every_stream(waiting_line: WaitingQueue, scripts: Scripts) -> None:
    [seat] = await run_rows(scripts, "r1")
    await scripts.hand_back("w1", [seat], is_crash=True)
    await accept(scripts, "r2")
    await scripts.accept(make.submission("r3", ticket=make.ticket("r3", priority="offline")), DEFAULT_BOUNDS)

    await waiting_line.refresh()

    assert ids(waiting_line) == ["r1", "r2", "r3"]
    returned = next(waiting_line.waiting)
    assert (returned.ordinal, returned.crashes, returned.is_returned) == (1, 1, True)


async def test_line_reads_what_is_new_when_it_is_refreshed(waiting_line: WaitingQueue, scripts: Scripts) -> None:
    await accept(scripts, "r1")
    await waiting_line.refresh()
    await accept(scripts, "r2")

    await waiting_line.refresh()

    assert ids(waiting_line) == ["r1", "r2"]


async def test_line_reads_more_than_one_page(client: Redis, clock: FakeClock) -> None:
    waiting_line = WaitingQueue(client, monotonic=clock, page=3)
    for i in range(7):
        await add(client, fields(id=f"r{i}".encode(), ticket=encode(make.ticket(f"r{i}"))))

    await waiting_line.refresh()

    assert ids(waiting_line) == [f"r{i}" for i in range(7)]


async def test_line_keeps_no_more_than_its_window_and_reads_on_when_that_runs_low(
    client: Redis, clock: FakeClock
) -> None:
    waiting_line = WaitingQueue(client, monotonic=clock, page=2, window=4)
    for i in range(7):
        await add(client, fields(id=f"r{i}".encode(), ticket=encode(make.ticket(f"r{i}"))))

    await waiting_line.refresh()
    await waiting_line.refresh()
    assert len(waiting_line) == 4
    waiting_line.drop(waiting_line.find(["r0", "r1"]))
    await waiting_line.refresh()

    assert ids(waiting_line) == ["r2", "r3", "r4", "r5"]


async def test_line_forgets_what_somebody_took(waiting_line: WaitingQueue, scripts: Scripts) -> None:
    await accept(scripts, "r1", "r2")
    await waiting_line.refresh()
    await scripts.cancel("r1", "client")

    await waiting_line.refresh()

    assert ids(waiting_line) == ["r2"]


async def test_line_reads_a_long_stream_anew_at_most_once_a_second(
    client: Redis, scripts: Scripts, clock: FakeClock
) -> None:
    waiting_line = WaitingQueue(client, monotonic=clock, page=2)
    await accept(scripts, *(f"r{i}" for i in range(5)))
    await waiting_line.refresh()
    await scripts.cancel("r0", "client")
    await waiting_line.refresh()
    await scripts.cancel("r1", "client")
    await waiting_line.refresh()
    assert ids(waiting_line) == ["r1", "r2", "r3", "r4"]

    clock.advance(RELOAD_S)
    await waiting_line.refresh()

    assert ids(waiting_line) == ["r2", "r3", "r4"]


async def test_line_drops_a_request_for_good(waiting_line: WaitingQueue, scripts: Scripts) -> None:
    await scripts.register(make.registration("w1"))
    await accept(scripts, "r1", "r2")
    await waiting_line.refresh()
    await scripts.form("w1", "c1", ["r1"])

    waiting_line.drop(waiting_line.find(["r1"]))
    await waiting_line.refresh()

    assert ids(waiting_line) == ["r2"]


async def test_line_names_what_is_past_its_deadline_until_it_is_dropped(
    waiting_line: WaitingQueue, scripts: Scripts
) -> None:
    await scripts.accept(make.submission("r1", timeout_ms=0), DEFAULT_BOUNDS)
    await accept(scripts, "r2")
    await waiting_line.refresh()

    assert [entry.request_id for entry in waiting_line.overdue()] == ["r1"]
    assert [entry.request_id for entry in waiting_line.overdue()] == ["r1"]
    waiting_line.drop(waiting_line.find(["r1"]))
    assert waiting_line.overdue() == []


@pytest.mark.parametrize(
    "entry",
    [
        {b"x": b"y"},
        fields(ticket=b"\xc1"),
        fields(ticket=None),
        fields(id=b"\xff\xfe"),
        fields(id=b"r2"),
        fields(ordinal=b"first"),
        fields(deadline_ms=b""),
        fields(crashes=None),
    ],
    ids=["foreign", "ticket", "no ticket", "bad id", "other id", "ordinal", "deadline", "no crashes"],
)
async def test_line_sets_aside_what_nobody_can_read(waiting_line: WaitingQueue, client: Redis, entry: Fields) -> None:
    await add(client, entry)

    await waiting_line.refresh()

    assert ids(waiting_line) == []
    assert [each.raw for each in waiting_line.unreadable.values()] == [entry]


@pytest.mark.parametrize(
    "ticket",
    [
        encode(make.ticket("r1", min_wire=99)),
        msgspec.msgpack.encode(["ticket", "r1", {"a": "map"}, None, 1, 1, "someday", 0, 99]),
    ],
    ids=["readable", "changed beyond reading"],
)
async def test_line_leaves_alone_what_a_newer_version_reads(
    waiting_line: WaitingQueue, client: Redis, ticket: bytes
) -> None:
    await add(client, fields(ticket=ticket))

    await waiting_line.refresh()

    assert (ids(waiting_line), len(waiting_line), dict(waiting_line.unreadable)) == ([], 1, {})


async def test_line_still_watches_the_deadline_of_what_a_newer_version_reads(
    waiting_line: WaitingQueue, client: Redis
) -> None:
    await add(client, fields(ticket=encode(make.ticket("r1", min_wire=99)), deadline_ms=b"1"))

    await waiting_line.refresh()

    assert [entry.request_id for entry in waiting_line.overdue()] == ["r1"]


async def test_line_remembers_no_deadlines_of_what_left_it(client: Redis, clock: FakeClock) -> None:
    waiting_line = WaitingQueue(client, monotonic=clock, page=5)
    for i in range(30):
        await add(client, fields(id=f"r{i}".encode(), ticket=encode(make.ticket(f"r{i}"))))
        await waiting_line.refresh()
        waiting_line.drop(waiting_line.find([f"r{i}"]))

    assert len(waiting_line._deadlines) <= 8


async def test_line_finds_every_entry_of_a_request(waiting_line: WaitingQueue, client: Redis) -> None:
    await add(client, fields())
    await add(client, fields())
    await waiting_line.refresh()

    waiting_line.drop(waiting_line.find(["r1"]))

    assert len(waiting_line) == 0


async def test_line_reads_from_the_start_when_it_was_cleared(waiting_line: WaitingQueue, scripts: Scripts) -> None:
    await accept(scripts, "r1")
    await waiting_line.refresh()

    waiting_line.clear()
    await waiting_line.refresh()

    assert ids(waiting_line) == ["r1"]
