"""FORM, branch by branch. Engine: none; Redis: all three servers."""

from __future__ import annotations

from typing import Any, cast

import pytest
from redis.asyncio import Redis

from broker import keys
from broker.scripts import DEFAULT_BOUNDS, Scripts
from broker.wire import Assignment
from harness import factories as make
from harness.reads import read_counts, read_free_rows, read_jobs, read_state, read_waiting
from harness.running import accept, run_rows


async def test_form_sends_a_cohort_in_one_job(scripts: Scripts, client: Redis) -> None:
    await scripts.register(make.registration("w1"))
    await accept(scripts, "r1", "r2")

    sent = await scripts.form("w1", "c1", ["r1", "r2"])

    assert sent == ["r1", "r2"]
    assert await read_jobs(client, "w1") == [[Assignment("r1", 1), Assignment("r2", 1)]]
    assert await read_waiting(client, keys.WAIT_INTERACTIVE) == []


async def test_form_sets_owner_and_attempt(scripts: Scripts, client: Redis) -> None:
    await run_rows(scripts, "r1")

    state = await read_state(client, "r1")
    assert [state[name] for name in ("status", "owner", "attempt", "cohort")] == [b"running", b"w1", b"1", b"c1"]
    assert await read_counts(client, keys.rows("w1")) == {"r1": 1}


async def test_form_writes_cohort_and_wire_version_into_the_job(scripts: Scripts, client: Redis) -> None:
    await scripts.register(make.registration("w1"))
    await accept(scripts, "r1")

    await scripts.form("w1", "c1", ["r1"], wire=3)

    [(_, job)] = await cast("Any", client.xrange(keys.jobs("w1")))
    assert (job[b"cohort"], job[b"wire"]) == (b"c1", b"3")
    assert int(job[b"formed_ms"]) > 0


async def test_form_lowers_free_rows_and_cache_slots(scripts: Scripts, client: Redis) -> None:
    await scripts.register(make.registration("w1", free_tokens=100))
    await accept(scripts, "r1", "r2")

    await scripts.form("w1", "c1", ["r1", "r2"])

    record = await cast("Any", client.hmget(keys.daemon("w1"), "free", "free_tokens"))
    assert record == [b"6", str(100 - 2 * 19).encode()]


async def test_form_sends_nothing_twice_when_run_twice(scripts: Scripts, client: Redis) -> None:
    await run_rows(scripts, "r1")

    again = await scripts.form("w1", "c1", ["r1"])

    assert again == []
    assert await read_jobs(client, "w1") == [[Assignment("r1", 1)]]
    assert await read_free_rows(client, "w1") == 7


async def test_form_never_sends_more_rows_than_are_free(scripts: Scripts, client: Redis) -> None:
    await scripts.register(make.registration("w1", free_rows=1))
    await accept(scripts, "r1", "r2")

    sent = await scripts.form("w1", "c1", ["r1", "r2"])

    assert sent == ["r1"]
    assert await read_waiting(client, keys.WAIT_INTERACTIVE) == ["r2"]


async def test_form_skips_what_does_not_fit_the_memory_and_takes_what_does(scripts: Scripts) -> None:
    await scripts.register(make.registration("w1", free_tokens=20))
    await scripts.accept(make.submission("r1", ticket=make.ticket("r1", max_tokens=18)), DEFAULT_BOUNDS)
    await accept(scripts, "r2", "r3")

    assert await scripts.form("w1", "c1", ["r1", "r2", "r3"]) == ["r2"]


async def test_form_sends_nothing_to_a_worker_that_does_not_accept(scripts: Scripts) -> None:
    await scripts.register(make.registration("w1", is_accepting=False))
    await accept(scripts, "r1")

    assert await scripts.form("w1", "c1", ["r1"]) == []


async def test_form_sends_nothing_to_a_worker_that_was_declared_dead(scripts: Scripts, client: Redis) -> None:
    await run_rows(scripts, "r1")
    await scripts.retire("w1")
    await cast("Any", client.hset(keys.daemon("w1"), "accepting", "1"))
    await accept(scripts, "r2")

    assert await scripts.form("w1", "c2", ["r2"]) == []


async def test_form_sends_nothing_to_a_worker_without_a_record(scripts: Scripts) -> None:
    await accept(scripts, "r1")

    assert await scripts.form("w1", "c1", ["r1"]) == []


async def test_form_skips_a_request_that_was_cancelled(scripts: Scripts) -> None:
    await scripts.register(make.registration("w1"))
    await accept(scripts, "r1", "r2")
    await scripts.cancel("r1", "client")

    assert await scripts.form("w1", "c1", ["r1", "r2"]) == ["r2"]


async def test_form_skips_a_request_that_is_past_its_deadline(scripts: Scripts, client: Redis) -> None:
    await scripts.register(make.registration("w1"))
    await scripts.accept(make.submission("r1", timeout_ms=0), DEFAULT_BOUNDS)

    assert await scripts.form("w1", "c1", ["r1"]) == []
    assert await read_waiting(client, keys.WAIT_INTERACTIVE) == ["r1"]


async def test_form_skips_a_request_that_is_unknown(scripts: Scripts) -> None:
    await scripts.register(make.registration("w1"))

    assert await scripts.form("w1", "c1", ["r1"]) == []


async def test_form_skips_a_request_whose_entry_somebody_took(scripts: Scripts, client: Redis) -> None:
    await scripts.register(make.registration("w1"))
    await accept(scripts, "r1")
    await cast("Any", client.xtrim(keys.WAIT_INTERACTIVE, maxlen=0))

    assert await scripts.form("w1", "c1", ["r1"]) == []
    assert (await read_state(client, "r1"))["attempt"] == b"0"


async def test_form_keeps_to_the_rows_of_an_api_key(scripts: Scripts, client: Redis) -> None:
    await scripts.register(make.registration("w1"))
    for request_id, key_id in (("r1", "a"), ("r2", "a"), ("r3", "b")):
        await scripts.accept(make.submission(request_id, ticket=make.ticket(request_id, key_id=key_id)), DEFAULT_BOUNDS)

    sent = await scripts.form("w1", "c1", ["r1", "r2", "r3"], rows_per_key=1)

    assert sent == ["r1", "r3"]
    assert await read_counts(client, keys.KEY_ROWS) == {"a": 1, "b": 1}


async def test_form_bounds_no_rows_when_requests_have_no_key(scripts: Scripts) -> None:
    await scripts.register(make.registration("w1"))
    await accept(scripts, "r1", "r2")

    assert await scripts.form("w1", "c1", ["r1", "r2"], rows_per_key=1) == ["r1", "r2"]


async def run_offline(scripts: Scripts, *request_ids: str, held: int | None = 0, free_rows: int | None = None) -> None:
    """A worker whose rows are all taken by offline work."""
    registration = make.registration("w1", free_rows=len(request_ids) if free_rows is None else free_rows)
    await scripts.register(registration)
    if held is not None:
        await scripts.beat("w1", {"held": held})
    await accept(scripts, *request_ids, priority="offline")
    assert await scripts.form("w1", "c1", request_ids) == list(request_ids)


AGE_MS = 600_000


async def test_form_lets_interactive_requests_take_the_places_of_offline_rows(scripts: Scripts, client: Redis) -> None:
    await run_offline(scripts, "o1", "o2")
    await accept(scripts, "r1", "r2", "r3")

    sent = await scripts.form("w1", "c2", ["r1", "r2", "r3"], over_younger_ms=AGE_MS)

    assert sent == ["r1", "r2"]
    assert await read_free_rows(client, "w1") == -2
    assert (await read_jobs(client, "w1"))[-1] == [Assignment("r1", 1), Assignment("r2", 1)]


async def test_form_sends_nothing_to_a_full_worker_unless_asked_to(scripts: Scripts) -> None:
    await run_offline(scripts, "o1")
    await accept(scripts, "r1")

    assert await scripts.form("w1", "c2", ["r1"]) == []


async def test_form_lets_offline_requests_take_no_place(scripts: Scripts) -> None:
    await run_offline(scripts, "o1")
    await accept(scripts, "o2", priority="offline")

    assert await scripts.form("w1", "c2", ["o2"], over_younger_ms=AGE_MS) == []


async def test_form_takes_no_place_of_a_row_that_has_aged(scripts: Scripts, client: Redis) -> None:
    await run_offline(scripts, "o1", "o2")
    await cast("Any", client.hset(keys.state("o1"), "accepted_ms", 1))
    await accept(scripts, "r1", "r2")

    assert await scripts.form("w1", "c2", ["r1", "r2"], over_younger_ms=AGE_MS) == ["r1"]


@pytest.mark.parametrize(("held", "sent"), [(0, ["r1", "r2"]), (1, ["r1"]), (5, []), (None, [])])
async def test_form_counts_out_the_rows_that_the_worker_leaves_alone(
    scripts: Scripts, held: int | None, sent: list[str]
) -> None:
    """None: it says nothing of them, so it cannot pause rows."""
    await run_offline(scripts, "o1", "o2", held=held)
    await accept(scripts, "r1", "r2")

    assert await scripts.form("w1", "c2", ["r1", "r2"], over_younger_ms=AGE_MS) == sent


async def test_form_takes_no_place_where_memory_is_short(scripts: Scripts, client: Redis) -> None:
    await run_offline(scripts, "o1")
    await cast("Any", client.hset(keys.daemon("w1"), "free_tokens", 18))
    await accept(scripts, "r1")

    assert await scripts.form("w1", "c2", ["r1"], over_younger_ms=AGE_MS) == []


async def test_free_rows_come_back_one_by_one_after_more_rows_than_are_decoded(scripts: Scripts, client: Redis) -> None:
    await run_offline(scripts, "o1")
    await accept(scripts, "r1")
    await scripts.form("w1", "c2", ["r1"], over_younger_ms=AGE_MS)

    await scripts.hand_back("w1", [Assignment("r1", 1)], is_crash=False)
    assert await read_free_rows(client, "w1") == 0
    await scripts.hand_back("w1", [Assignment("o1", 1)], is_crash=False)

    assert await read_free_rows(client, "w1") == 1
