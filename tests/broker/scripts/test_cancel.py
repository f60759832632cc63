"""CANCEL, branch by branch. Engine: none; Redis: all three servers."""

from __future__ import annotations

from typing import Any, cast

import pytest
from redis.asyncio import Redis

from broker import keys
from broker.scripts import DEFAULT_BOUNDS, RowCommit, Scripts
from broker.wire import Cause, Finished, decode_events, pack_tokens
from harness import factories as make
from harness.channels import listening
from harness.reads import read_counts, read_end, read_state, read_status, read_waiting
from harness.redis_servers import Server
from harness.running import accept, run_rows


async def test_cancel_knows_no_request_that_was_never_accepted(scripts: Scripts) -> None:
    assert await scripts.cancel("r1", "client") == "unknown"


@pytest.mark.parametrize(
    ("cause", "status", "reason"),
    [
        ("client", "cancelled", "cancelled"),
        ("listener", "cancelled", "cancelled"),
        ("limit", "cancelled", "cancelled"),
        ("deadline", "expired", "deadline"),
        ("stop", "finished", "stop"),
    ],
)
async def test_cancel_ends_a_waiting_request(
    scripts: Scripts, client: Redis, cause: Cause, status: str, reason: str
) -> None:
    await accept(scripts, "r1")

    assert await scripts.cancel("r1", cause) == "cancelled"
    assert await read_status(client, "r1") == status
    assert await read_end(client, "r1") == Finished("r1", cast("Any", reason), 0, -1, cause)
    assert await read_waiting(client, keys.WAIT_INTERACTIVE) == []
    assert await read_counts(client, keys.LOAD) == {}


async def test_cancel_counts_the_cause(scripts: Scripts, client: Redis) -> None:
    await accept(scripts, "r1")

    await scripts.cancel("r1", "client")

    assert await read_counts(client, keys.ENDED) == {"interactive:cancelled:client": 1}


async def test_cancel_ends_a_returned_request_with_its_tokens(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")
    await scripts.commit("w1", [RowCommit(seat, 0, pack_tokens([7] * 300))], {})
    await scripts.hand_back("w1", [seat], is_crash=False)

    assert await scripts.cancel("r1", "client") == "cancelled"
    assert await read_end(client, "r1") == Finished("r1", "cancelled", 300, -1, "client")
    assert await read_waiting(client, keys.WAIT_RETURNED) == []


async def test_cancel_leaves_a_running_request_to_its_worker(scripts: Scripts, client: Redis) -> None:
    await run_rows(scripts, "r1")

    assert await scripts.cancel("r1", "client") == "pending"
    assert await read_status(client, "r1") == "running"


async def test_cancel_keeps_the_first_cause(scripts: Scripts, client: Redis) -> None:
    await run_rows(scripts, "r1")
    await scripts.cancel("r1", "deadline")

    assert await scripts.cancel("r1", "client") == "pending"
    assert (await read_state(client, "r1"))["cancel"] == b"deadline"


async def test_cancel_changes_nothing_when_the_request_has_ended(scripts: Scripts, client: Redis) -> None:
    await accept(scripts, "r1")
    await scripts.cancel("r1", "client")

    assert await scripts.cancel("r1", "operator") == "ended"
    assert (await read_state(client, "r1"))["cancel"] == b"client"
    assert await read_counts(client, keys.ENDED) == {"interactive:cancelled:client": 1}


async def test_cancel_tells_the_listener_of_a_waiting_request(scripts: Scripts, server: Server) -> None:
    await scripts.accept(make.submission("r1", reply="channel"), DEFAULT_BOUNDS)

    async with listening(server, "channel") as ear:
        await scripts.cancel("r1", "operator")

        assert decode_events(await ear.hear()) == (Finished("r1", "cancelled", 0, -1, "operator"),)


async def test_cancel_wakes_the_workers_when_the_request_runs(scripts: Scripts, server: Server) -> None:
    await run_rows(scripts, "r1")

    async with listening(server, keys.CONTROL) as ear:
        await scripts.cancel("r1", "client")

        assert await ear.hear() == b"cancel"


async def test_cancel_needs_no_entry_to_end_a_request(scripts: Scripts, client: Redis) -> None:
    await accept(scripts, "r1")
    await cast("Any", client.xtrim(keys.WAIT_INTERACTIVE, maxlen=0))

    assert await scripts.cancel("r1", "client") == "cancelled"
    assert (await scripts.accept(make.submission("r1"), DEFAULT_BOUNDS)).is_new is False
