"""Offline rows that give way to interactive ones on their worker. Engine: scripted, stepped by hand; Redis: both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from broker import keys
from broker.errors import BrokerUnavailableError
from broker.wire import Assignment, Finished
from harness.reads import read_end, read_free_rows, read_log, read_state, read_status, read_waiting
from harness.redis_servers import Server
from tests.workers.rig import FragileServer, Rig, opened, wait_until

OVER_MS = 600_000


@pytest_asyncio.fixture
async def full(server: Server, client: Redis) -> AsyncIterator[Rig]:
    """Two offline rows decode on two places; the second has fewer tokens. An interactive row then took its place."""
    async with opened(server, client) as rig:
        await crowd(rig)
        yield rig


async def crowd(rig: Rig) -> None:
    """A step is always being taken, so whatever is asked of the engine begins with the step after it."""
    await rig.run_requests("much", max_tokens=12, priority="offline")
    await rig.step(2)
    await rig.run_requests("little", max_tokens=12, priority="offline")
    await rig.step(2)
    await interrupt(rig, "chat")


async def interrupt(rig: Rig, name: str, *, max_tokens: int = 3) -> None:
    """An interactive request is sent to a full worker."""
    await rig.accept(name, max_tokens)
    assert await rig.form(name, over_younger_ms=OVER_MS) == [name]
    await rig.worker.take_jobs(block_ms=None)


def paused(rig: Rig) -> list[str]:
    return [row.seat.request_id for row in rig.worker.committer.rows if row.is_paused and row.is_running]


async def test_interactive_row_decodes_at_once_in_the_place_of_the_row_with_the_fewest_tokens(
    full: Rig, client: Redis
) -> None:
    await full.step(3)

    assert paused(full) == ["little"]
    assert await read_log(client, "chat") == full.expected("chat", 3)[:2]
    assert len(await read_log(client, "little")) == 2


async def test_paused_row_goes_on_without_another_attempt_and_without_prefill(full: Rig, client: Redis) -> None:
    await full.run_out()

    state = await read_state(client, "little")
    end = await read_end(client, "little")
    assert (state["status"], state["attempt"]) == (b"finished", b"1")
    assert await read_log(client, "little") == full.expected("little", 12)
    assert isinstance(end, Finished)
    assert end.stats.cycles == 12


async def test_free_row_is_reported_only_when_no_row_is_paused(full: Rig, client: Redis) -> None:
    worker_id = full.worker.membership.id
    assert await read_free_rows(client, worker_id) == -1

    await full.step(4)

    assert await read_status(client, "chat") == "finished"
    assert paused(full) == []
    assert await read_free_rows(client, worker_id) == 0


async def test_row_that_is_back_is_not_paused_again_within_its_time(full: Rig) -> None:
    await full.step(4)
    await interrupt(full, "chat2")

    assert paused(full) == ["much"]

    await full.step(4)
    full.clock.advance(5.0)
    await interrupt(full, "chat3")

    assert paused(full) == ["little"]


async def test_worker_says_how_many_rows_it_leaves_alone(full: Rig, client: Redis) -> None:
    async def told() -> list[bytes]:
        await full.worker.beat()
        found = await cast("Any", client.hmget(keys.daemon(full.worker.membership.id), "active", "paused", "held"))
        return cast("list[bytes]", found)

    assert await told() == [b"2", b"1", b"0"]

    await full.step(4)

    assert await told() == [b"2", b"0", b"1"]


async def test_paused_row_is_cancelled_with_the_next_commit(full: Rig, client: Redis) -> None:
    await full.scripts.cancel("little", "client")

    await full.step()

    assert await read_status(client, "little") == "cancelled"
    assert len(full.worker.committer.rows) == 2


async def test_paused_row_ends_at_its_deadline(full: Rig, client: Redis) -> None:
    await cast("Any", client.hset(keys.state("little"), "deadline_ms", 1))

    await full.step()

    assert await read_status(client, "little") == "expired"
    assert await read_free_rows(client, full.worker.membership.id) == 0


async def test_paused_row_that_somebody_took_over_is_dropped(full: Rig, client: Redis) -> None:
    worker_id = full.worker.membership.id
    await full.scripts.hand_back(worker_id, [Assignment("little", 1)], is_crash=False)

    await full.step()

    assert [row.seat.request_id for row in full.worker.committer.rows] == ["much", "chat"]
    assert await read_waiting(client, keys.WAIT_RETURNED) == ["little"]
    assert await full.count_active_rows() == 2


async def test_paused_rows_are_handed_back_when_a_drain_takes_too_long(server: Server, client: Redis) -> None:
    async with opened(server, client, grace_s=0.0) as rig:
        await crowd(rig)

        await rig.worker.drain()

        returned = await read_waiting(client, keys.WAIT_RETURNED)
        assert sorted(returned) == ["chat", "little", "much"]
        assert await read_log(client, "little") == rig.expected("little", 12)[:1]


async def test_paused_rows_are_taken_over_when_their_worker_dies(full: Rig, client: Redis) -> None:
    worker_id = full.worker.membership.id
    seats = await full.scripts.retire(worker_id)

    await full.scripts.hand_back(worker_id, seats, is_crash=True)

    assert {seat.request_id for seat in seats} == {"much", "little", "chat"}
    assert (await read_state(client, "little"))["crashes"] == b"1"


async def test_row_without_memory_to_be_paused_in_goes_back_into_the_line(server: Server, client: Redis) -> None:
    row_bytes = 2048 * 1024
    async with opened(server, client, memory_bytes=2 * row_bytes) as rig:
        await crowd(rig)
        assert paused(rig) == []

        await rig.step(2)

        assert await read_waiting(client, keys.WAIT_RETURNED) == ["little"]
        assert await read_free_rows(client, rig.worker.membership.id) == 0
        assert await read_log(client, "chat") == rig.expected("chat", 3)[:1]


async def test_row_that_gave_way_goes_back_into_the_line_when_redis_is_there_again(fragile: FragileServer) -> None:
    client = fragile.client()
    async with opened(fragile, client, memory_bytes=2 * 2048 * 1024) as rig:
        await crowd(rig)
        with fragile.away(), pytest.raises(BrokerUnavailableError):
            await rig.worker.committer.step()
        await wait_until(lambda: rig.worker.committer.rows.decoding == 2)

        await rig.worker.committer.step()

        assert await read_waiting(client, keys.WAIT_RETURNED) == ["little"]
    await client.aclose()


async def test_handed_back_row_is_left_alone_when_it_is_back(server: Server, client: Redis) -> None:
    async with opened(server, client, memory_bytes=2 * 2048 * 1024) as rig:
        await crowd(rig)
        await rig.step(4)
        await rig.form("little")
        await rig.worker.take_jobs(block_ms=None)

        await rig.worker.beat()

        record = await cast("Any", client.hget(keys.daemon(rig.worker.membership.id), "held"))
        assert record == b"1"
