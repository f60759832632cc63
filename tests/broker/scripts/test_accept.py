"""ACCEPT, branch by branch. Engine: none; Redis: all three servers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs
from redis.asyncio import Redis

from broker import keys
from broker.errors import ConflictError, QueueFullError
from broker.scripts import DEFAULT_BOUNDS, Accepted, Bounds, Scripts
from broker.wire import decode_request, decode_ticket, seed_of
from harness import factories as make
from harness.channels import listening
from harness.reads import read_counts, read_state, read_waiting
from harness.redis_servers import Server

RETAIN_AND_A_WEEK_MS = 600_000 + 604_800_000


async def test_accept_gives_each_request_the_next_ordinal(scripts: Scripts) -> None:
    first = await scripts.accept(make.submission("r1"), DEFAULT_BOUNDS)
    second = await scripts.accept(make.submission("r2"), DEFAULT_BOUNDS)

    assert (first, second) == (Accepted(1, is_new=True, request_id="r1"), Accepted(2, is_new=True, request_id="r2"))


async def test_accept_writes_the_request_and_its_place_in_line(scripts: Scripts, client: Redis) -> None:
    submission = make.submission("r1", reply="channel")

    await scripts.accept(submission, DEFAULT_BOUNDS)

    state = await read_state(client, "r1")
    assert decode_request(state["body"]) == submission.request
    assert decode_ticket(state["ticket"]) == submission.ticket
    assert int(state["seed"], 16) == seed_of("r1")
    assert [state[name] for name in ("status", "attempt", "crashes", "reply")] == [b"waiting", b"0", b"0", b"channel"]
    assert await read_waiting(client, keys.WAIT_INTERACTIVE) == ["r1"]


async def test_accept_says_in_the_ticket_which_version_reads_the_request(scripts: Scripts, client: Redis) -> None:
    submission = make.submission("r1")
    newer = replace(submission, request=structs.replace(submission.request, min_tokens=3))

    await scripts.accept(newer, DEFAULT_BOUNDS)

    assert decode_ticket((await read_state(client, "r1"))["ticket"]).min_wire == 2


async def test_accept_puts_an_offline_request_into_the_offline_line(scripts: Scripts, client: Redis) -> None:
    await scripts.accept(make.submission("r1", ticket=make.ticket("r1", priority="offline")), DEFAULT_BOUNDS)

    assert await read_waiting(client, keys.WAIT_OFFLINE) == ["r1"]


async def test_accept_changes_nothing_when_run_twice(scripts: Scripts, client: Redis) -> None:
    await scripts.accept(make.submission("r1"), DEFAULT_BOUNDS)

    again = await scripts.accept(make.submission("r1"), DEFAULT_BOUNDS)

    assert again == Accepted(1, is_new=False, request_id="r1")
    assert await read_waiting(client, keys.WAIT_INTERACTIVE) == ["r1"]
    assert (await read_counts(client, keys.LOAD))["requests:interactive"] == 1


async def test_accept_refuses_an_id_when_another_body_has_it(scripts: Scripts) -> None:
    await scripts.accept(make.submission("r1"), DEFAULT_BOUNDS)

    with pytest.raises(ConflictError):
        await scripts.accept(make.submission("r1", ticket=make.ticket("r1", max_tokens=17)), DEFAULT_BOUNDS)


async def test_accept_refuses_an_id_when_another_seed_has_it(scripts: Scripts) -> None:
    await scripts.accept(make.submission("r1"), DEFAULT_BOUNDS)

    with pytest.raises(ConflictError):
        await scripts.accept(replace(make.submission("r1"), seed=1), DEFAULT_BOUNDS)


async def test_accept_refuses_when_the_bound_in_requests_is_reached(scripts: Scripts, client: Redis) -> None:
    await scripts.accept(make.submission("r1"), Bounds(requests=1))

    with pytest.raises(QueueFullError, match="requests"):
        await scripts.accept(make.submission("r2"), Bounds(requests=1))

    assert await read_waiting(client, keys.WAIT_INTERACTIVE) == ["r1"]


async def test_accept_refuses_when_the_bound_in_tokens_is_reached(scripts: Scripts, client: Redis) -> None:
    await scripts.accept(make.submission("r1"), Bounds(tokens=37))

    with pytest.raises(QueueFullError, match="tokens"):
        await scripts.accept(make.submission("r2"), Bounds(tokens=37))

    assert await read_counts(client, keys.LOAD) == {"requests:interactive": 1, "tokens:interactive": 19}


async def test_accept_counts_each_priority_apart(scripts: Scripts) -> None:
    await scripts.accept(make.submission("r1"), Bounds(requests=1))

    offline = make.submission("r2", ticket=make.ticket("r2", priority="offline"))

    assert (await scripts.accept(offline, Bounds(requests=1))).is_new


async def test_accept_lets_the_state_outlive_the_deadline(scripts: Scripts, client: Redis) -> None:
    await scripts.accept(make.submission("r1", timeout_ms=5_000), DEFAULT_BOUNDS)

    assert 0 <= 5_000 + RETAIN_AND_A_WEEK_MS - await client.pttl(keys.state("r1")) < 60_000


async def test_accept_wakes_the_former(scripts: Scripts, server: Server) -> None:
    async with listening(server, keys.WAKE) as ear:
        await scripts.accept(make.submission("r1"), DEFAULT_BOUNDS)

        assert await ear.hear() == b"accept"
