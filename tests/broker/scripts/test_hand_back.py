"""HAND_BACK, branch by branch. Engine: none; Redis: all three servers."""

from __future__ import annotations

from typing import Any, cast

import pytest
from redis.asyncio import Redis

from broker import keys
from broker.scripts import DEFAULT_BOUNDS, RowCommit, Scripts
from broker.wire import Assignment, Cause, Failed, Finished, decode_events, pack_tokens
from harness import factories as make
from harness.channels import listening
from harness.reads import read_counts, read_end, read_free_rows, read_jobs, read_state, read_status, read_waiting
from harness.redis_servers import Server
from harness.running import run_rows


async def returned_entry(client: Redis) -> dict[bytes, bytes]:
    [(_, entry)] = await cast("Any", client.xrange(keys.WAIT_RETURNED))
    return cast("dict[bytes, bytes]", entry)


async def test_hand_back_puts_a_request_into_the_line_of_the_returned(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")
    await scripts.commit("w1", [RowCommit(seat, 0, pack_tokens([7, 8]))], {})

    assert await scripts.hand_back("w1", [seat], is_crash=False) == {"r1": "waiting"}

    entry = await returned_entry(client)
    kept = [entry[name] for name in (b"id", b"ordinal", b"crashes", b"committed", b"priority", b"cost")]
    assert kept == [b"r1", b"1", b"0", b"2", b"interactive", b"19"]


async def test_hand_back_keeps_accept_time_and_deadline(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")

    await scripts.hand_back("w1", [seat], is_crash=False)

    entry, state = await returned_entry(client), await read_state(client, "r1")
    assert (entry[b"accepted_ms"], entry[b"deadline_ms"]) == (state["accepted_ms"], state["deadline_ms"])


async def test_hand_back_gives_the_row_back_and_keeps_the_load(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")

    await scripts.hand_back("w1", [seat], is_crash=False)

    assert await read_free_rows(client, "w1") == 8
    assert await read_counts(client, keys.LOAD) == {"requests:interactive": 1, "tokens:interactive": 19}


async def test_hand_back_lets_another_worker_have_it_with_the_next_attempt(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")
    await scripts.hand_back("w1", [seat], is_crash=False)
    await scripts.register(make.registration("w2"))

    assert await scripts.form("w2", "c2", ["r1"]) == ["r1"]
    assert await read_jobs(client, "w2") == [[Assignment("r1", 2)]]


async def test_hand_back_changes_nothing_when_run_twice(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")
    await scripts.hand_back("w1", [seat], is_crash=True)

    assert await scripts.hand_back("w1", [seat], is_crash=True) == {"r1": "lost"}
    assert await read_waiting(client, keys.WAIT_RETURNED) == ["r1"]
    assert (await read_state(client, "r1"))["crashes"] == b"1"


async def test_hand_back_run_twice_leaves_the_seat_of_a_newer_attempt(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")
    await scripts.hand_back("w1", [seat], is_crash=False)
    await scripts.form("w1", "c2", ["r1"])

    assert await scripts.hand_back("w1", [seat], is_crash=False) == {"r1": "lost"}
    assert await read_counts(client, keys.rows("w1")) == {"r1": 2}
    assert await read_free_rows(client, "w1") == 7


async def test_hand_back_removes_the_seat_of_a_request_that_is_gone(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")
    await client.delete(keys.state("r1"))

    assert await scripts.hand_back("w1", [seat], is_crash=True) == {"r1": "lost"}
    assert await scripts.retire("w1") == []


async def test_hand_back_counts_a_crash_only_when_the_owner_died(scripts: Scripts, client: Redis) -> None:
    first, second = await run_rows(scripts, "r1", "r2")

    await scripts.hand_back("w1", [first], is_crash=True)
    await scripts.hand_back("w1", [second], is_crash=False)

    assert (await read_state(client, "r1"))["crashes"] == b"1"
    assert (await read_state(client, "r2"))["crashes"] == b"0"


async def test_hand_back_gives_up_a_request_at_the_bound_of_crashes(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")
    body = (await read_state(client, "r1"))["body"]

    assert await scripts.hand_back("w1", [seat], is_crash=True, max_crashes=1) == {"r1": "dead"}

    [(_, letter)] = await cast("Any", client.xrange(keys.DEAD_LETTERS))
    assert (letter[b"id"], letter[b"why"], letter[b"body"]) == (b"r1", b"crashes", body)
    assert await read_status(client, "r1") == "failed"
    assert await read_counts(client, keys.LOAD) == {}


async def test_hand_back_tells_the_listener_when_it_gives_up(scripts: Scripts, server: Server) -> None:
    await scripts.register(make.registration("w1"))
    await scripts.accept(make.submission("r1", reply="channel"), DEFAULT_BOUNDS)
    await scripts.form("w1", "c1", ["r1"])

    async with listening(server, "channel") as ear:
        await scripts.hand_back("w1", [Assignment("r1", 1)], is_crash=True, max_crashes=1)

        [event] = decode_events(await ear.hear())
    assert isinstance(event, Failed)
    assert event.code == "crashed_workers"


@pytest.mark.parametrize(
    ("cause", "status", "reason"),
    [
        ("client", "cancelled", "cancelled"),
        ("operator", "cancelled", "cancelled"),
        ("deadline", "expired", "deadline"),
        ("stop", "finished", "stop"),
    ],
)
async def test_hand_back_ends_a_request_that_somebody_cancelled(
    scripts: Scripts, client: Redis, cause: Cause, status: str, reason: str
) -> None:
    [seat] = await run_rows(scripts, "r1")
    await scripts.commit("w1", [RowCommit(seat, 0, pack_tokens([7, 8]))], {})
    await scripts.cancel("r1", cause)

    assert await scripts.hand_back("w1", [seat], is_crash=True) == {"r1": "ended"}
    assert await read_status(client, "r1") == status
    assert await read_end(client, "r1") == Finished("r1", cast("Any", reason), 2, -1, cause)


async def test_hand_back_wakes_the_former(scripts: Scripts, server: Server) -> None:
    [seat] = await run_rows(scripts, "r1")

    async with listening(server, keys.WAKE) as ear:
        await scripts.hand_back("w1", [seat], is_crash=False)

        assert await ear.hear() == b"hand_back"


async def test_hand_back_says_from_where_on_a_row_is_no_suspect(scripts: Scripts, client: Redis) -> None:
    first, second = await run_rows(scripts, "r1", "r2")
    await scripts.commit("w1", [RowCommit(first, 0, pack_tokens([7, 8]))], {})

    await scripts.hand_back("w1", [first], is_crash=True)
    await scripts.hand_back("w1", [second], is_crash=False)

    assert (await read_state(client, "r1"))["suspect_below"] == b"10"
    assert "suspect_below" not in await read_state(client, "r2")
