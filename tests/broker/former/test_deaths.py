"""What the former does about the dead, step by step with a fake clock. Engine: none; Redis: all three servers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from redis.asyncio import Redis

from broker import keys
from broker.former.daemon import Former
from broker.registry import Registry
from broker.scripts import RowCommit, Scripts
from broker.wire import Assignment, pack_tokens
from harness import factories as make
from harness.clock import FakeClock
from harness.reads import read_counts, read_jobs, read_status, read_waiting
from harness.running import accept, run_rows

LEASE_S = 60.0


async def watch_for_a_lease(former: Former, clock: FakeClock) -> None:
    """Steps often enough that the watcher is never late, until what stood still is dead."""
    for _ in range(7):
        await former.step()
        clock.advance(LEASE_S / 5)
    await former.step()


async def test_former_hands_the_rows_of_a_dead_worker_to_another(
    former: Former, scripts: Scripts, client: Redis, clock: FakeClock
) -> None:
    await run_rows(scripts, "r1", "r2", worker_id="dying")

    await watch_for_a_lease(former, clock)
    await scripts.register(make.registration("w1"))
    await former.step()

    assert sorted(seat for job in await read_jobs(client, "w1") for seat in job)[0] == Assignment("r1", 2)
    assert not await cast("Any", client.exists(keys.daemon("dying"), keys.rows("dying"), keys.jobs("dying")))


async def test_former_takes_nothing_from_a_worker_that_beats(
    former: Former, scripts: Scripts, client: Redis, clock: FakeClock
) -> None:
    await run_rows(scripts, "r1")

    for _ in range(10):
        await scripts.beat("w1", {})
        await former.step()
        clock.advance(LEASE_S / 5)

    assert await read_status(client, "r1") == "running"
    assert await read_counts(client, keys.rows("w1")) == {"r1": 1}


async def test_former_calls_nobody_dead_when_it_was_late_itself(
    former: Former, scripts: Scripts, client: Redis, clock: FakeClock
) -> None:
    await run_rows(scripts, "r1")

    for _ in range(5):
        await former.step()
        clock.advance(LEASE_S * 3)

    assert await read_status(client, "r1") == "running"


async def test_former_takes_over_where_another_died_while_taking_over(
    former: Former, scripts: Scripts, client: Redis
) -> None:
    await run_rows(scripts, "r1")
    await scripts.retire("w1")

    await former.step()

    assert await read_status(client, "r1") == "waiting"
    assert not await cast("Any", client.exists(keys.daemon("w1")))


async def test_former_hands_back_the_rows_of_a_worker_whose_record_has_expired(
    former: Former, scripts: Scripts, client: Redis, clock: FakeClock
) -> None:
    await run_rows(scripts, "r1")
    await client.delete(keys.daemon("w1"))

    await watch_for_a_lease(former, clock)

    assert await read_status(client, "r1") == "waiting"


async def test_former_removes_other_daemons_that_died(
    former: Former, scripts: Scripts, registry: Registry, clock: FakeClock
) -> None:
    await scripts.register(replace(make.registration("api1"), fields={"kind": "api"}, free_rows=None))

    await watch_for_a_lease(former, clock)

    assert [record.id for record in await registry.daemons()] == [former.id]


async def test_former_blames_a_crash_on_the_suspect_alone(
    former: Former, scripts: Scripts, client: Redis, clock: FakeClock
) -> None:
    await run_rows(scripts, "poison", worker_id="first")
    await watch_for_a_lease(former, clock)
    await scripts.register(make.registration("second"))
    await former.step()
    await accept(scripts, "innocent")
    await former.step()

    await watch_for_a_lease(former, clock)

    crashes = [await cast("Any", client.hget(keys.state(each), "crashes")) for each in ("poison", "innocent")]
    assert crashes == [b"2", b"0"]


async def test_former_blames_a_crash_on_the_suspect_and_not_on_a_proven_row_beside_it(
    former: Former, scripts: Scripts, client: Redis, clock: FakeClock
) -> None:
    await run_rows(scripts, "suspect", worker_id="first")
    await watch_for_a_lease(former, clock)
    await run_rows(scripts, "proven", worker_id="second")
    await scripts.commit("second", [RowCommit(Assignment("proven", 1), 0, pack_tokens(range(8)))], {})
    assert await former.step() == 1

    await watch_for_a_lease(former, clock)

    crashes = [await cast("Any", client.hget(keys.state(each), "crashes")) for each in ("suspect", "proven")]
    assert crashes == [b"2", b"0"]


async def test_former_runs_one_suspect_at_a_time_on_a_worker(
    former: Former, scripts: Scripts, client: Redis, clock: FakeClock
) -> None:
    await run_rows(scripts, "r1", "r2", worker_id="dying")
    await watch_for_a_lease(former, clock)
    await scripts.register(make.registration("w1"))

    assert [await former.step(), await former.step()] == [1, 0]
    assert len(await read_waiting(client, keys.WAIT_RETURNED)) == 1


async def test_former_lets_nobody_join_a_suspect_until_it_has_proven_itself(
    former: Former, scripts: Scripts, client: Redis, clock: FakeClock
) -> None:
    await run_rows(scripts, "suspect", worker_id="dying")
    await watch_for_a_lease(former, clock)
    await scripts.register(make.registration("w1"))
    await former.step()
    await accept(scripts, "r1")

    assert await former.step() == 0
    await scripts.commit("w1", [RowCommit(Assignment("suspect", 2), 0, pack_tokens(range(8)))], {})

    assert await former.step() == 1


async def test_former_sends_a_suspect_only_beside_rows_that_have_proven_themselves(
    former: Former, scripts: Scripts, client: Redis, clock: FakeClock
) -> None:
    await run_rows(scripts, "suspect", worker_id="dying")
    await watch_for_a_lease(former, clock)
    await run_rows(scripts, "fresh", worker_id="w1")

    assert await former.step() == 0
    await scripts.commit("w1", [RowCommit(Assignment("fresh", 1), 0, pack_tokens(range(8)))], {})

    assert await former.step() == 1


async def test_former_gives_a_poison_request_up_after_three_workers(
    former: Former, scripts: Scripts, client: Redis, clock: FakeClock
) -> None:
    await accept(scripts, "poison")

    for i in range(3):
        await scripts.register(make.registration(f"w{i}"))
        await watch_for_a_lease(former, clock)

    assert await read_status(client, "poison") == "failed"
    assert await cast("Any", client.xlen(keys.DEAD_LETTERS)) == 1
