"""What waits and will never run is ended: at its deadline, or as too long. Engine: none; Redis: all three servers."""

from __future__ import annotations

from typing import Any, cast

import pytest
from redis.asyncio import Redis

from broker import keys
from broker.former.clearing import SWEEP_MAX
from broker.former.daemon import Former
from broker.former.row_limits import REMEMBER_S, SETTLE_S
from broker.scripts import DEFAULT_BOUNDS, Scripts
from broker.wire import Failed, Finished
from harness import factories as make
from harness.clock import FakeClock
from harness.reads import read_counts, read_end, read_status, read_waiting
from harness.running import accept, run_rows


async def accept_costly(scripts: Scripts, request_id: str, *, max_tokens: int) -> None:
    ticket = make.ticket(request_id, max_tokens=max_tokens)
    await scripts.accept(make.submission(request_id, ticket=ticket), DEFAULT_BOUNDS)


async def test_request_whose_waiting_stream_was_deleted_ends_at_its_deadline(
    former: Former, scripts: Scripts, client: Redis
) -> None:
    for i in range(3):
        await scripts.accept(make.submission(f"r{i}", timeout_ms=0), DEFAULT_BOUNDS)
    await client.delete(keys.WAIT_INTERACTIVE)

    await former.form()

    assert [await read_end(client, f"r{i}") for i in range(3)] == [
        Finished(f"r{i}", "deadline", 0, -1, "deadline") for i in range(3)
    ]
    assert await read_counts(client, keys.LOAD) == {}
    assert await client.zcard(keys.LIVE) == 0


async def test_round_ends_a_bounded_number_and_the_next_one_goes_on(
    former: Former, scripts: Scripts, client: Redis
) -> None:
    for i in range(SWEEP_MAX + 1):
        await scripts.accept(make.submission(f"r{i}", timeout_ms=0), DEFAULT_BOUNDS)
    await client.delete(keys.WAIT_INTERACTIVE)

    await former.form()
    left = await client.zcard(keys.LIVE)
    await former.form()

    assert (left, await client.zcard(keys.LIVE)) == (1, 0)


async def test_running_request_past_its_deadline_does_not_stand_in_the_way_of_others(
    former: Former, scripts: Scripts, client: Redis
) -> None:
    await run_rows(scripts, "running")
    await client.zadd(keys.LIVE, {"running": 1})

    await former.form()

    assert await cast("Any", client).zscore(keys.LIVE, "running") > 1
    assert await read_status(client, "running") == "running"


async def test_name_that_an_older_script_left_on_the_list_is_taken_off(
    former: Former, scripts: Scripts, client: Redis
) -> None:
    await accept(scripts, "r1")
    await scripts.cancel("r1", "client")
    await client.zadd(keys.LIVE, {"r1": 1, "gone": 1})

    await former.form()

    assert await client.zcard(keys.LIVE) == 0


async def test_request_longer_than_every_row_fails_at_once(
    former: Former, scripts: Scripts, client: Redis, clock: FakeClock
) -> None:
    await scripts.register(make.registration("w1", lane=make.lane(max_context_tokens=2048)))
    await former.form()
    clock.advance(SETTLE_S)
    await accept_costly(scripts, "long", max_tokens=1_000_000)
    await accept_costly(scripts, "short", max_tokens=10)

    assert await former.form() == 1

    end = await read_end(client, "long")
    assert isinstance(end, Failed)
    assert (end.code, await read_status(client, "short")) == ("context_length_exceeded", "running")
    assert await read_waiting(client, keys.WAIT_INTERACTIVE) == []
    assert (await read_counts(client, keys.LOAD))["requests:interactive"] == 1


@pytest.mark.parametrize(
    "worker",
    [None, make.registration("w1", is_accepting=False), make.registration("w1", lane=make.lane(model="other@1"))],
    ids=["no worker", "starting", "another model"],
)
async def test_long_request_waits_while_no_worker_of_its_model_takes_any(
    former: Former, scripts: Scripts, client: Redis, clock: FakeClock, worker: object
) -> None:
    if worker is not None:
        await scripts.register(worker)  # type: ignore[arg-type]  # a registration, as the cases above are
    await accept_costly(scripts, "long", max_tokens=1_000_000)
    await former.form()
    clock.advance(SETTLE_S)

    await former.form()

    assert await read_status(client, "long") == "waiting"


async def test_long_request_waits_for_a_worker_that_left_not_long_ago(
    former: Former, scripts: Scripts, client: Redis, clock: FakeClock
) -> None:
    await scripts.register(make.registration("small", lane=make.lane(max_context_tokens=100)))
    await scripts.register(make.registration("large", lane=make.lane(max_context_tokens=5000)))
    await former.form()
    await scripts.retire("large")
    await accept_costly(scripts, "long", max_tokens=1000)
    clock.advance(SETTLE_S)
    await former.form()
    first = await read_status(client, "long")

    clock.advance(REMEMBER_S)
    await former.form()

    assert (first, await read_status(client, "long")) == ("waiting", "failed")


async def test_former_that_has_just_begun_calls_nothing_too_long(
    former: Former, scripts: Scripts, client: Redis
) -> None:
    await scripts.register(make.registration("w1"))
    await accept_costly(scripts, "long", max_tokens=1_000_000)

    await former.form()

    assert await read_status(client, "long") == "waiting"


async def test_reject_is_safe_to_run_twice(scripts: Scripts, client: Redis) -> None:
    await accept(scripts, "r1")
    failed = Failed("r1", "context_length_exceeded", "too long")

    assert [await scripts.reject("r1", failed), await scripts.reject("r1", failed)] == [True, False]
    assert await read_end(client, "r1") == failed
    assert await read_counts(client, keys.ENDED) == {"interactive:failed:context_length_exceeded": 1}


async def test_reject_leaves_a_running_request_alone(scripts: Scripts, client: Redis) -> None:
    await run_rows(scripts, "r1")

    assert not await scripts.reject("r1", Failed("r1", "context_length_exceeded", "too long"))
    assert await read_status(client, "r1") == "running"
