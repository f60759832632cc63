"""Daemons of two wire versions side by side, as during an upgrade. Engine: none; Redis: all three servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest
from redis.asyncio import Redis

from broker import keys
from broker.former.daemon import Former, FormerConfig
from broker.scripts import DEFAULT_BOUNDS, Scripts
from broker.wire import WIRE_VERSION
from harness import factories as make
from harness.clock import FakeClock
from harness.reads import read_jobs, read_status, read_waiting
from harness.redis_servers import Server

NEXT = WIRE_VERSION + 1


@pytest.fixture
async def newer(server: Server, client: Redis, clock: FakeClock) -> AsyncIterator[Former]:
    """A former of the next version."""
    blocking = server.client(blocking=True)
    config = FormerConfig(redis_url="unused", lease_s=60.0, wire=NEXT)
    yield Former(config, commands=client, blocking=blocking, monotonic=clock)
    await blocking.aclose()


@pytest.fixture
async def fleet(scripts: Scripts) -> None:
    """A worker of each version, and two requests that only the newer one reads among others."""
    for worker_id, wire in (("old", WIRE_VERSION), ("new", NEXT)):
        await scripts.register(make.registration(worker_id, lane=make.lane(wire=wire)))
    for request_id, wire in (("r1", 1), ("n1", NEXT), ("r2", 1), ("n2", NEXT)):
        ticket = make.ticket(request_id, min_wire=wire)
        await scripts.accept(make.submission(request_id, ticket=ticket), DEFAULT_BOUNDS)


async def sent_to(client: Redis, worker_id: str) -> Sequence[str]:
    return sorted(seat.request_id for job in await read_jobs(client, worker_id) for seat in job)


@pytest.mark.usefixtures("fleet")
async def test_old_former_sends_what_it_reads_and_leaves_the_rest_alone(former: Former, client: Redis) -> None:
    assert await former.form() == 2

    assert sorted([*await sent_to(client, "old"), *await sent_to(client, "new")]) == ["r1", "r2"]
    assert await read_waiting(client, keys.WAIT_INTERACTIVE) == ["n1", "n2"]
    assert await client.xlen(keys.DEAD_LETTERS) == 0


@pytest.mark.usefixtures("fleet")
async def test_new_former_sends_a_request_only_to_a_worker_that_reads_it(newer: Former, client: Redis) -> None:
    assert await newer.form() == 4

    assert {"n1", "n2"} <= set(await sent_to(client, "new"))
    assert set(await sent_to(client, "old")) <= {"r1", "r2"}


@pytest.mark.usefixtures("fleet")
async def test_old_and_new_former_beside_each_other_send_everything_once(
    former: Former, newer: Former, client: Redis
) -> None:
    assert await former.form() + await newer.form() + await former.form() == 4

    everything = [*await sent_to(client, "old"), *await sent_to(client, "new")]
    assert sorted(everything) == ["n1", "n2", "r1", "r2"]


@pytest.mark.usefixtures("fleet")
async def test_request_of_a_newer_version_waits_while_only_old_workers_are_there(
    newer: Former, scripts: Scripts, client: Redis
) -> None:
    await scripts.retire("new")

    await newer.form()

    assert await read_status(client, "n1") == "waiting"
    assert await sent_to(client, "old") == ["r1", "r2"]
