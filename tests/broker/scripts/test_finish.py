"""FINISH, branch by branch. Engine: none; Redis: all three servers."""

from __future__ import annotations

from typing import Any, cast

import pytest
from redis.asyncio import Redis

from broker import keys
from broker.scripts import DEFAULT_BOUNDS, FinishResult, RowCommit, RowFinish, Scripts
from broker.wire import Assignment, Failed, Finished, Stats, decode_events, pack_tokens
from harness import factories as make
from harness.channels import listening
from harness.reads import read_counts, read_end, read_free_rows, read_state, read_status
from harness.redis_servers import Server
from harness.running import run_rows

RETAIN_MS = 600_000


def end_of(seat: Assignment, *, length: int = -1, reason: str = "stop") -> RowFinish:
    event = Finished(seat.request_id, cast("Any", reason), length, text_end=5, stats=Stats(cycles=3))
    return RowFinish(seat, length, "finished", reason, event)


async def test_finish_writes_the_terminal_state(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")

    assert await scripts.finish("w1", end_of(seat)) == FinishResult("ok")
    assert await read_status(client, "r1") == "finished"
    assert await read_end(client, "r1") == end_of(seat).event


async def test_finish_says_so_when_this_attempt_had_ended_it(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")
    await scripts.finish("w1", end_of(seat))

    assert await scripts.finish("w1", end_of(seat)) == FinishResult("again")
    assert await read_free_rows(client, "w1") == 8
    assert await read_counts(client, keys.ENDED) == {"interactive:finished:stop": 1}


async def test_finish_refuses_a_second_end(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")
    await scripts.finish("w1", end_of(seat))

    assert await scripts.finish("w1", end_of(seat, reason="length")) == FinishResult("lost")
    assert await read_end(client, "r1") == end_of(seat).event


@pytest.mark.parametrize(("worker_id", "attempt"), [("w2", 1), ("w1", 2)], ids=["another worker", "another attempt"])
async def test_finish_refuses_who_does_not_own_the_request(
    scripts: Scripts, client: Redis, worker_id: str, attempt: int
) -> None:
    await run_rows(scripts, "r1")

    assert await scripts.finish(worker_id, end_of(Assignment("r1", attempt))) == FinishResult("lost")
    assert await read_status(client, "r1") == "running"


async def test_finish_names_the_length_when_the_log_is_short(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")
    await scripts.commit("w1", [RowCommit(seat, 0, pack_tokens([7]))], {})

    assert await scripts.finish("w1", end_of(seat, length=2)) == FinishResult("short", 1)
    assert await read_status(client, "r1") == "running"


async def test_finish_accepts_the_length_that_the_log_has(scripts: Scripts) -> None:
    [seat] = await run_rows(scripts, "r1")
    await scripts.commit("w1", [RowCommit(seat, 0, pack_tokens([7, 8]))], {})

    assert await scripts.finish("w1", end_of(seat, length=2)) == FinishResult("ok")


async def test_finish_gives_row_cache_slots_and_load_back(scripts: Scripts, client: Redis) -> None:
    await scripts.register(make.registration("w1", free_tokens=100))
    await scripts.accept(make.submission("r1", ticket=make.ticket("r1", key_id="a")), DEFAULT_BOUNDS)
    await scripts.form("w1", "c1", ["r1"])

    await scripts.finish("w1", end_of(Assignment("r1", 1)))

    assert await cast("Any", client.hmget(keys.daemon("w1"), "free", "free_tokens")) == [b"8", b"100"]
    assert await read_counts(client, keys.LOAD) == {}
    assert not await cast("Any", client.exists(keys.KEY_ROWS, keys.rows("w1")))


async def test_finish_ends_a_request_when_the_record_of_its_worker_is_gone(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")
    await client.delete(keys.daemon("w1"))

    assert await scripts.finish("w1", end_of(seat)) == FinishResult("ok")
    assert not await cast("Any", client.exists(keys.daemon("w1")))


async def test_finish_drops_the_prompt_and_starts_retention(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")
    await scripts.commit("w1", [RowCommit(seat, 0, pack_tokens([7]), [b"x"])], {})

    await scripts.finish("w1", end_of(seat))

    assert not {"body", "ticket", "owner"} & set(await read_state(client, "r1"))
    for key in (keys.state("r1"), keys.log("r1"), keys.logprobs("r1")):
        assert 0 <= RETAIN_MS - await client.pttl(key) < 60_000


async def test_finish_tells_the_listener_and_wakes_the_former(scripts: Scripts, server: Server) -> None:
    await scripts.register(make.registration("w1"))
    await scripts.accept(make.submission("r1", reply="channel"), DEFAULT_BOUNDS)
    await scripts.form("w1", "c1", ["r1"])
    finish = end_of(Assignment("r1", 1))

    async with listening(server, "channel") as listener, listening(server, keys.WAKE) as former:
        await scripts.finish("w1", finish)

        assert decode_events(await listener.hear()) == (finish.event,)
        assert await former.hear() == b"finish"


async def test_finish_carries_a_failure(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")
    failed = Failed("r1", "row_rejected", "the prompt does not fit: 9 €")

    await scripts.finish("w1", RowFinish(seat, -1, "failed", "row_rejected", failed))

    assert await read_end(client, "r1") == failed
    assert await read_counts(client, keys.ENDED) == {"interactive:failed:row_rejected": 1}
