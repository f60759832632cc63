"""What the former sees of long waiting streams: a window of every line. Engine: none; Redis: fakeredis."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from itertools import islice
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from broker import keys
from broker.former.waiting import PAGES, WaitingQueue
from broker.wire import Ticket, encode
from harness import factories as make
from harness.clock import FakeClock
from harness.redis_servers import InProcessServer

PAGE, WINDOW = 5, 4
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
async def client() -> AsyncIterator[Redis]:
    client = InProcessServer().client()
    yield client
    await client.aclose()


@pytest.fixture
def waiting_line(client: Redis) -> WaitingQueue:
    return WaitingQueue(client, monotonic=FakeClock(), page=PAGE, window=WINDOW)


async def accept(client: Redis, *tickets: Ticket) -> None:
    """Waiting entries as ACCEPT writes them, without the rest of it."""
    pipe = client.pipeline(transaction=False)
    for ticket in tickets:
        fields = {"id": ticket.id, "ordinal": ticket.id.strip(LETTERS) or 0, "ticket": encode(ticket)}
        fields |= {"accepted_ms": 1, "deadline_ms": 99999999999999, "crashes": 0, "committed": 0}
        pipe.xadd(keys.wait(ticket.priority), cast("Any", fields))
    await pipe.execute()


async def take(client: Redis, *request_ids: str) -> None:
    """Others take these from the offline stream."""
    for entry_id, fields in await cast("Any", client).xrange(keys.WAIT_OFFLINE):
        if fields[b"id"].decode() in request_ids:
            await client.xdel(keys.WAIT_OFFLINE, entry_id)


def offline(request_id: str, *, key_id: str = "", model: str = make.MODEL, max_tokens: int = 16) -> Ticket:
    return make.ticket(request_id, priority="offline", key_id=key_id, model=model, max_tokens=max_tokens)


def seen(waiting_line: WaitingQueue) -> list[str]:
    return [each.ticket.id for each in waiting_line.waiting]


def by_line(waiting_line: WaitingQueue) -> dict[object, list[str]]:
    lines: defaultdict[object, list[str]] = defaultdict(list)
    for each in sorted(waiting_line.waiting, key=lambda each: each.ordinal):
        lines[each.ticket.key_id, each.ticket.max_tokens].append(each.ticket.id)
    return lines


async def read_all(waiting_line: WaitingQueue) -> None:
    await waiting_line.refresh()
    while waiting_line.is_behind:
        await waiting_line.refresh()


def crowd(count: int = 50) -> Sequence[Ticket]:
    return [offline(f"crowd{i}", key_id="a") for i in range(count)]


@pytest.mark.parametrize(
    "last",
    [
        make.ticket("last", key_id="a"),
        offline("last", key_id="b"),
        offline("last", key_id="a", model="other@1"),
        offline("last", key_id="a", max_tokens=500),
    ],
    ids=["interactive", "another key", "another model", "another size"],
)
async def test_no_crowd_hides_what_stands_in_another_line(
    client: Redis, waiting_line: WaitingQueue, last: Ticket
) -> None:
    await accept(client, *crowd(), last)

    await read_all(waiting_line)

    assert "last" in seen(waiting_line)
    assert len(waiting_line) <= 2 * WINDOW


async def test_interactive_request_is_seen_in_the_first_round_whatever_else_waits(
    client: Redis, waiting_line: WaitingQueue
) -> None:
    await accept(client, *crowd(), make.ticket("last"))

    await waiting_line.refresh()

    assert "last" in seen(waiting_line)


async def test_round_reads_a_bounded_number_of_entries(client: Redis, waiting_line: WaitingQueue) -> None:
    await accept(client, *crowd(PAGE * PAGES + 1))

    await waiting_line.refresh()
    was_behind = waiting_line.is_behind
    await waiting_line.refresh()

    assert (was_behind, waiting_line.is_behind) == (True, False)


@pytest.mark.parametrize("seed", range(5))
async def test_what_is_seen_of_a_line_is_always_the_front_of_it(
    client: Redis, waiting_line: WaitingQueue, seed: int
) -> None:
    dice = random.Random(seed)
    tickets = [offline(f"r{i}", key_id=dice.choice("abc"), max_tokens=dice.choice([5, 90])) for i in range(60)]
    await accept(client, *tickets[:40])
    unserved: defaultdict[object, list[str]] = defaultdict(list)
    for ticket in tickets[:40]:
        unserved[ticket.key_id, ticket.max_tokens].append(ticket.id)
    later = iter(tickets[40:])

    while any(unserved.values()):
        await read_all(waiting_line)
        for line, ids in by_line(waiting_line).items():
            assert ids == unserved[line][: len(ids)]
        for request_id in dice.sample(found := seen(waiting_line), min(3, len(found))):
            await take(client, request_id)
            waiting_line.drop(waiting_line.find([request_id]))
            next(ids for ids in unserved.values() if request_id in ids).remove(request_id)
        for newcomer in islice(later, 1):
            await accept(client, newcomer)
            unserved[newcomer.key_id, newcomer.max_tokens].append(newcomer.id)

    assert next(later, None) is None


async def test_window_is_read_on_although_others_took_what_was_behind_it(
    client: Redis, waiting_line: WaitingQueue
) -> None:
    await accept(client, *crowd(20))
    await read_all(waiting_line)
    await take(client, *(f"crowd{i}" for i in range(19)))

    waiting_line.drop(waiting_line.find([f"crowd{i}" for i in range(WINDOW)]))
    await read_all(waiting_line)

    assert seen(waiting_line) == ["crowd19"]
    assert waiting_line.beyond == []


async def test_stream_that_was_deleted_is_forgotten(client: Redis, waiting_line: WaitingQueue) -> None:
    await accept(client, *crowd(20))
    await read_all(waiting_line)
    await client.delete(keys.WAIT_OFFLINE)

    await read_all(waiting_line)

    assert (seen(waiting_line), waiting_line.beyond) == ([], [])


async def test_tokens_that_wait_unseen_are_counted(client: Redis, waiting_line: WaitingQueue) -> None:
    await accept(client, *crowd(30), *(offline(f"m{i}", model="other@1", max_tokens=97) for i in range(10)))

    await read_all(waiting_line)

    tokens = {beyond.pool_key[0]: beyond.tokens for beyond in waiting_line.beyond}
    kept = defaultdict[str, int](int)
    for each in waiting_line.waiting:
        kept[each.ticket.model] += each.cost
    assert tokens[make.MODEL] + kept[make.MODEL] == pytest.approx(30 * 19)
    assert tokens["other@1"] + kept["other@1"] == pytest.approx(10 * 100)


async def test_tokens_of_a_stream_that_is_half_read_are_estimated_from_what_was_read(
    client: Redis, waiting_line: WaitingQueue
) -> None:
    await accept(client, *crowd(10 * PAGE * PAGES))

    await waiting_line.refresh()

    waiting = sum(each.cost for each in waiting_line.waiting) + sum(beyond.tokens for beyond in waiting_line.beyond)
    assert waiting == pytest.approx(10 * PAGE * PAGES * 19)


async def test_what_a_newer_version_reads_has_a_window_of_its_own(client: Redis, waiting_line: WaitingQueue) -> None:
    await accept(client, *(make.ticket(f"n{i}", min_wire=99) for i in range(20)), make.ticket("last"))

    await read_all(waiting_line)

    assert seen(waiting_line) == ["last"]
    assert len(waiting_line) <= WINDOW + 1
    assert await cast("Any", client).xlen(keys.WAIT_INTERACTIVE) == 21
