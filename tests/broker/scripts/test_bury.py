"""BURY, branch by branch. Engine: none; Redis: all three servers."""

from __future__ import annotations

from typing import Any, cast

from redis.asyncio import Redis

from broker import keys
from broker.scripts import Scripts
from broker.wire import Failed, decode_events
from harness import factories as make
from harness.channels import listening
from harness.reads import read_counts, read_end, read_status, read_waiting
from harness.redis_servers import Server
from harness.running import accept, run_rows

Entry = dict[bytes, bytes]


async def add(client: Redis, entry: Entry) -> str:
    return cast("bytes", await cast("Any", client).xadd(keys.WAIT_INTERACTIVE, entry)).decode()


async def first_entry(client: Redis) -> tuple[str, Entry]:
    [(entry_id, entry)] = await cast("Any", client.xrange(keys.WAIT_INTERACTIVE))
    return entry_id.decode(), entry


async def letters(client: Redis) -> list[Entry]:
    return [entry for _, entry in await cast("Any", client.xrange(keys.DEAD_LETTERS))]


async def test_bury_moves_an_entry_raw_to_the_dead_letters(scripts: Scripts, client: Redis) -> None:
    entry = {b"some": b"\xff\x00thing"}
    entry_id = await add(client, entry)

    assert await scripts.bury(keys.WAIT_INTERACTIVE, entry_id, entry, why="no idea")

    [letter] = await letters(client)
    assert letter == {b"why": b"no idea", b"stream": keys.WAIT_INTERACTIVE.encode(), **entry}
    assert await read_counts(client, keys.LOAD) == {}


async def test_bury_does_nothing_when_run_twice(scripts: Scripts, client: Redis) -> None:
    entry_id = await add(client, {b"a": b"b"})
    await scripts.bury(keys.WAIT_INTERACTIVE, entry_id, {b"a": b"b"}, why="x")

    assert not await scripts.bury(keys.WAIT_INTERACTIVE, entry_id, {b"a": b"b"}, why="x")
    assert len(await letters(client)) == 1


async def test_bury_fails_the_request_that_waits_by_the_entry(scripts: Scripts, client: Redis) -> None:
    await accept(scripts, "r1")
    entry_id, entry = await first_entry(client)

    await scripts.bury(keys.WAIT_INTERACTIVE, entry_id, entry, why="bad ticket")

    assert await read_status(client, "r1") == "failed"
    assert await read_end(client, "r1") == Failed("r1", "unreadable", "the request could not be read: bad ticket")
    assert await read_counts(client, keys.LOAD) == {}


async def test_bury_tells_the_listener(scripts: Scripts, client: Redis, server: Server) -> None:
    await scripts.accept(make.submission("r1", reply="channel"), make.BOUNDS)
    entry_id, entry = await first_entry(client)

    async with listening(server, "channel") as ear:
        await scripts.bury(keys.WAIT_INTERACTIVE, entry_id, entry, why="x")

        assert isinstance(decode_events(await ear.hear())[0], Failed)


async def test_bury_leaves_a_request_alone_that_waits_by_another_entry(scripts: Scripts, client: Redis) -> None:
    await accept(scripts, "r1")
    entry_id = await add(client, {b"id": b"r1"})

    await scripts.bury(keys.WAIT_INTERACTIVE, entry_id, {b"id": b"r1"}, why="x")

    assert await read_status(client, "r1") == "waiting"
    assert await read_waiting(client, keys.WAIT_INTERACTIVE) == ["r1"]


async def test_bury_leaves_a_running_request_alone(scripts: Scripts, client: Redis) -> None:
    await run_rows(scripts, "r1")
    entry_id = await add(client, {b"id": b"r1"})

    await scripts.bury(keys.WAIT_INTERACTIVE, entry_id, {b"id": b"r1"}, why="x")

    assert await read_status(client, "r1") == "running"


async def test_bury_lowers_the_load_of_a_request_whose_record_is_gone(scripts: Scripts, client: Redis) -> None:
    await accept(scripts, "r1", "r2")
    await client.delete(keys.state("r1"))
    (entry_id, entry), _ = await cast("Any", client.xrange(keys.WAIT_INTERACTIVE))

    await scripts.bury(keys.WAIT_INTERACTIVE, entry_id.decode(), entry, why="no record")

    assert await read_counts(client, keys.LOAD) == {"requests:interactive": 1, "tokens:interactive": 19}


async def test_bury_counts_no_load_of_an_entry_with_bad_counts(scripts: Scripts, client: Redis) -> None:
    entry = {b"id": b"r1", b"priority": b"interactive", b"cost": b"many"}
    entry_id = await add(client, entry)

    assert await scripts.bury(keys.WAIT_INTERACTIVE, entry_id, entry, why="x")
    assert await read_counts(client, keys.LOAD) == {}


async def test_bury_keeps_the_first_fields_of_an_entry_with_too_many(scripts: Scripts, client: Redis) -> None:
    entry = {str(i).encode(): b"x" for i in range(9000)}
    entry_id = await add(client, entry)

    assert await scripts.bury(keys.WAIT_INTERACTIVE, entry_id, entry, why="x")
    assert len((await letters(client))[0]) == 2 + 64
