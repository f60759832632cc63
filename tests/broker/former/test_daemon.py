"""The former, step by step with a fake clock. Engine: none; Redis: all three servers."""

from __future__ import annotations

from typing import Any, cast

import pytest
from redis.asyncio import Redis

from broker import keys
from broker.errors import BrokerConfigError
from broker.former.daemon import Former, FormerConfig
from broker.former.policy import PolicyConfig
from broker.former.waiting import PAGE
from broker.registry import Registry
from broker.scripts import DEFAULT_BOUNDS, Scripts
from broker.wire import Assignment, Failed, Finished
from harness import factories as make
from harness.clock import FakeClock
from harness.reads import read_counts, read_end, read_jobs, read_status, read_waiting
from harness.redis_servers import InProcessRedis
from harness.running import accept, run_rows

LEASE_S = 60.0


def make_former(client: Redis, clock: FakeClock, **policy: Any) -> Former:
    config = FormerConfig("unused", policy=PolicyConfig(**policy), lease_s=LEASE_S)
    return Former(config, commands=client, blocking=client, monotonic=clock)


async def test_former_sends_what_waits_to_a_free_worker(former: Former, scripts: Scripts, client: Redis) -> None:
    await scripts.register(make.registration("w1"))
    await accept(scripts, "r1", "r2")

    assert await former.step() == 2
    assert await read_jobs(client, "w1") == [[Assignment("r1", 1), Assignment("r2", 1)]]


async def test_former_sends_nothing_when_nothing_waits(former: Former, scripts: Scripts) -> None:
    await scripts.register(make.registration("w1"))

    assert await former.step() == 0


async def test_former_sends_nothing_twice(former: Former, scripts: Scripts) -> None:
    await scripts.register(make.registration("w1"))
    await accept(scripts, "r1")

    assert [await former.step(), await former.step()] == [1, 0]


async def test_former_keeps_waiting_what_has_no_free_row(former: Former, scripts: Scripts, client: Redis) -> None:
    await scripts.register(make.registration("w1", free_rows=1))
    await accept(scripts, "r1", "r2")

    await former.step()

    assert await read_waiting(client, keys.WAIT_INTERACTIVE) == ["r2"]


async def test_former_sees_past_any_number_of_requests_that_nobody_serves(
    former: Former, scripts: Scripts, client: Redis
) -> None:
    await scripts.accept(make.submission("x", ticket=make.ticket("x", model="absent@0")), DEFAULT_BOUNDS)
    [(_, entry)] = await cast("Any", client.xrange(keys.WAIT_INTERACTIVE))
    pipe = client.pipeline(transaction=False)
    for _ in range(PAGE + 100):
        pipe.xadd(keys.WAIT_INTERACTIVE, entry)
    await pipe.execute()
    await accept(scripts, "r1")
    await scripts.register(make.registration("w1"))

    assert await former.step() == 1
    assert await read_jobs(client, "w1") == [[Assignment("r1", 1)]]


async def test_former_serves_returned_requests_first(former: Former, scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1", worker_id="old")
    await accept(scripts, "r2")
    await scripts.hand_back("old", [seat], is_crash=False)
    await scripts.retire("old")
    await scripts.register(make.registration("w1", free_rows=1))

    await former.step()

    assert await read_jobs(client, "w1") == [[Assignment("r1", 2)]]


async def test_former_expires_what_waited_past_its_deadline(former: Former, scripts: Scripts, client: Redis) -> None:
    await scripts.register(make.registration("w1"))
    await scripts.accept(make.submission("r1", timeout_ms=0), DEFAULT_BOUNDS)

    assert await former.step() == 0
    assert await read_status(client, "r1") == "expired"
    assert await read_end(client, "r1") == Finished("r1", "deadline", 0, -1, "deadline")


async def test_former_buries_what_nobody_can_read(former: Former, scripts: Scripts, client: Redis) -> None:
    await scripts.register(make.registration("w1"))
    await cast("Any", client.xadd(keys.WAIT_INTERACTIVE, {"x": "y"}))
    await accept(scripts, "r1")

    assert await former.step() == 1
    assert await cast("Any", client.xlen(keys.DEAD_LETTERS)) == 1
    assert await read_waiting(client, keys.WAIT_INTERACTIVE) == []


async def test_former_fails_a_request_whose_ticket_nobody_can_read(
    former: Former, scripts: Scripts, client: Redis
) -> None:
    await accept(scripts, "r1")
    [(entry_id, entry)] = await cast("Any", client.xrange(keys.WAIT_INTERACTIVE))
    await cast("Any", client.xtrim(keys.WAIT_INTERACTIVE, maxlen=0))
    again = await cast("Any", client.xadd(keys.WAIT_INTERACTIVE, entry | {b"ticket": b"\xc1"}))
    await cast("Any", client.hset(keys.state("r1"), "entry", again))

    await former.step()

    assert isinstance(await read_end(client, "r1"), Failed)
    assert await read_counts(client, keys.LOAD) == {}


async def test_former_leaves_alone_what_a_newer_version_reads(former: Former, scripts: Scripts, client: Redis) -> None:
    await scripts.register(make.registration("w1", lane=make.lane(wire=99)))
    await scripts.accept(make.submission("r1", ticket=make.ticket("r1", min_wire=99)), DEFAULT_BOUNDS)

    assert await former.step() == 0
    assert await read_waiting(client, keys.WAIT_INTERACTIVE) == ["r1"]
    assert await read_status(client, "r1") == "waiting"


async def test_former_buries_an_entry_by_which_nobody_waits(former: Former, scripts: Scripts, client: Redis) -> None:
    await scripts.register(make.registration("w1"))
    await accept(scripts, "r1")
    await client.delete(keys.state("r1"))

    assert [await former.step(), await former.step()] == [0, 0]
    assert await read_waiting(client, keys.WAIT_INTERACTIVE) == []
    assert await read_counts(client, keys.LOAD) == {}


async def test_former_buries_an_overdue_entry_whose_record_is_gone(
    former: Former, scripts: Scripts, client: Redis
) -> None:
    await scripts.accept(make.submission("r1", timeout_ms=0), DEFAULT_BOUNDS)
    await client.delete(keys.state("r1"))

    await former.step()

    assert await read_waiting(client, keys.WAIT_INTERACTIVE) == []
    assert await read_counts(client, keys.LOAD) == {}


async def test_former_buries_the_second_entry_of_a_request(former: Former, scripts: Scripts, client: Redis) -> None:
    await accept(scripts, "r1")
    [(_, entry)] = await cast("Any", client.xrange(keys.WAIT_INTERACTIVE))
    await cast("Any", client.xadd(keys.WAIT_OFFLINE, entry))
    await scripts.register(make.registration("w1"))

    assert await former.step() + await former.step() == 1
    assert await read_jobs(client, "w1") == [[Assignment("r1", 1)]]
    await former.step()
    assert await read_waiting(client, keys.WAIT_OFFLINE) == []
    assert await read_status(client, "r1") == "running"


async def test_former_keeps_an_entry_that_the_worker_had_no_room_for(
    scripts: Scripts, client: Redis, clock: FakeClock
) -> None:
    former = make_former(client, clock, rows_per_key=1)
    await scripts.register(make.registration("w1"))
    for request_id in ("r1", "r2"):
        await scripts.accept(make.submission(request_id, ticket=make.ticket(request_id, key_id="a")), DEFAULT_BOUNDS)

    assert [await former.step(), await former.step()] == [1, 0]
    assert await read_waiting(client, keys.WAIT_INTERACTIVE) == ["r2"]


async def test_former_holds_a_row_for_company_and_lets_it_go_when_it_is_full(
    scripts: Scripts, client: Redis, clock: FakeClock
) -> None:
    former = make_former(client, clock, batch_wait_ms=60_000)
    await scripts.register(make.registration("w1", free_rows=2))
    await accept(scripts, "r1")

    assert await former.step() == 0
    await accept(scripts, "r2")
    assert await former.step() == 2


async def test_former_takes_turns_between_keys_over_several_rounds(
    former: Former, scripts: Scripts, client: Redis
) -> None:
    await scripts.register(make.registration("w1", free_rows=1))
    for request_id, key_id in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        await scripts.accept(make.submission(request_id, ticket=make.ticket(request_id, key_id=key_id)), DEFAULT_BOUNDS)
    await former.step()
    await scripts.hand_back("w1", [Assignment("a1", 1)], is_crash=False)
    await scripts.cancel("a1", "client")

    await former.step()

    assert (await read_jobs(client, "w1"))[1:] == [[Assignment("b1", 1)]]


async def test_former_registers_itself_and_beats(
    former: Former, registry: Registry, client: Redis, clock: FakeClock
) -> None:
    await former.step()
    clock.advance(LEASE_S / 5)
    await former.step()

    [record] = await registry.daemons()
    assert (record.id, record.kind, record.beat, record.fields["working"]) == (former.id, "former", 1, "1")


async def test_former_stands_by_when_another_holds_the_lease(
    former: Former, scripts: Scripts, client: Redis, clock: FakeClock
) -> None:
    other = make_former(client, clock)
    await other.step()
    await scripts.register(make.registration("w1"))
    await accept(scripts, "r1")

    assert await former.step() == 0
    assert (other.is_working, former.is_working) == (True, False)
    assert await other.step() == 1


async def test_former_takes_the_lease_over_when_it_is_free(
    former: Former, scripts: Scripts, client: Redis, clock: FakeClock
) -> None:
    other = make_former(client, clock)
    await other.step()
    await former.step()
    await client.delete(keys.FORMER_LEASE)
    clock.advance(LEASE_S / 5)

    await former.step()

    assert former.is_working


async def test_former_registers_anew_when_it_was_declared_dead(
    former: Former, scripts: Scripts, registry: Registry, clock: FakeClock
) -> None:
    await former.step()
    first_id = former.id
    await scripts.retire(first_id)
    clock.advance(LEASE_S / 5)

    await former.step()

    assert former.id != first_id
    assert [record.id for record in await registry.daemons()] == [former.id]


async def test_former_goes_on_when_redis_was_emptied(
    former: Former, scripts: Scripts, client: Redis, clock: FakeClock
) -> None:
    await accept(scripts, "lost")
    await former.step()
    await cast("Any", client.flushall())
    clock.advance(LEASE_S / 5)
    await scripts.register(make.registration("w1"))
    await accept(scripts, "r1")

    assert await former.step() + await former.step() == 1
    assert await read_jobs(client, "w1") == [[Assignment("r1", 1)]]


async def test_former_refuses_a_server_that_may_evict(clock: FakeClock) -> None:
    class Evicting(InProcessRedis):
        async def info(self, section: str | None = None, *args: str, **kwargs: Any) -> dict[str, Any]:
            return {"maxmemory_policy": "allkeys-lru"}

    client = cast("Redis", Evicting())

    with pytest.raises(BrokerConfigError, match="noeviction"):
        await make_former(client, clock).run()
    await client.aclose()


async def test_former_says_which_wire_version_reads_a_job(former: Former, scripts: Scripts, client: Redis) -> None:
    await scripts.register(make.registration("w1"))
    await accept(scripts, "r1")

    await former.step()

    [(_, job)] = await cast("Any", client.xrange(keys.jobs("w1")))
    assert job[b"wire"] == b"1"


async def test_former_tells_with_its_heartbeat_what_it_sent(
    former: Former, scripts: Scripts, registry: Registry, clock: FakeClock
) -> None:
    await scripts.register(make.registration("w1"))
    await former.step()
    await accept(scripts, "r1", "r2", "r3")
    await former.step()
    clock.advance(LEASE_S)
    await former.step()

    told = [record.fields["snapshot"] for record in await registry.daemons() if record.kind == "former"]

    assert told == ['{"cohorts": 1, "rows": 3, "cohort_sizes": {"3": 1}, "waits_ms": {}}']
