"""The limits of an API key in ACCEPT, and what FINISH and CANCEL give back. Engine: none; Redis: all three servers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from redis.asyncio import Redis

from broker import keys
from broker.errors import QuotaError
from broker.scripts import DEFAULT_BOUNDS, Quota, RowCommit, RowFinish, Scripts, Submission
from broker.wire import Assignment, Finished, pack_tokens
from harness import factories as make


def metered(request_id: str, quota: Quota) -> Submission:
    """3 prompt tokens and at most 16 of completion, paid for by the key `k`."""
    return replace(make.submission(request_id, ticket=make.ticket(request_id, key_id="k")), quota=quota)


async def test_accept_refuses_when_the_key_has_had_its_requests_of_the_minute(scripts: Scripts) -> None:
    quota = Quota(requests_per_minute=2)
    first = await scripts.accept(metered("r1", quota), DEFAULT_BOUNDS)
    await scripts.accept(metered("r2", quota), DEFAULT_BOUNDS)

    with pytest.raises(QuotaError, match="requests") as refusal:
        await scripts.accept(metered("r3", quota), DEFAULT_BOUNDS)

    assert first.requests_left == 1
    assert first.tokens_left is None
    assert refusal.value.retry_after_s == pytest.approx(30, abs=2)


async def test_accept_reserves_prompt_and_completion_when_tokens_are_limited(scripts: Scripts) -> None:
    quota = Quota(tokens_per_minute=30)
    first = await scripts.accept(metered("r1", quota), DEFAULT_BOUNDS)

    with pytest.raises(QuotaError, match="tokens") as refusal:
        await scripts.accept(metered("r2", quota), DEFAULT_BOUNDS)

    assert first.tokens_left == 30 - 19
    assert refusal.value.retry_after_s == pytest.approx(60 * 8 / 30, abs=2)


async def test_accept_says_never_when_one_request_is_larger_than_the_limit(scripts: Scripts) -> None:
    with pytest.raises(QuotaError) as refusal:
        await scripts.accept(metered("r1", Quota(tokens_per_minute=18)), DEFAULT_BOUNDS)

    assert refusal.value.retry_after_s is None


async def test_accept_takes_nothing_from_the_bucket_when_it_refuses(scripts: Scripts, client: Redis) -> None:
    quota = Quota(requests_per_minute=9, tokens_per_minute=20)
    await scripts.accept(metered("r1", quota), DEFAULT_BOUNDS)
    before = await client.hget(keys.bucket("k"), "requests")

    with pytest.raises(QuotaError):
        await scripts.accept(metered("r2", quota), DEFAULT_BOUNDS)

    assert await client.hget(keys.bucket("k"), "requests") == before


async def test_accept_of_the_same_request_is_paid_for_once(scripts: Scripts) -> None:
    quota = Quota(requests_per_minute=1)
    await scripts.accept(metered("r1", quota), DEFAULT_BOUNDS)

    again = await scripts.accept(metered("r1", quota), DEFAULT_BOUNDS)

    assert not again.is_new


async def test_cancel_gives_back_what_was_not_used(scripts: Scripts) -> None:
    quota = Quota(tokens_per_minute=600)
    await scripts.accept(metered("r1", quota), DEFAULT_BOUNDS)
    await scripts.cancel("r1", "client")

    second = await scripts.accept(metered("r2", quota), DEFAULT_BOUNDS)

    assert second.tokens_left == pytest.approx(600 - 3 - 19, abs=2)


async def test_finish_gives_back_what_was_not_used_once(scripts: Scripts) -> None:
    quota, seat = Quota(tokens_per_minute=600), Assignment("r1", 1)
    await scripts.register(make.registration("w1"))
    await scripts.accept(metered("r1", quota), DEFAULT_BOUNDS)
    await scripts.form("w1", "c1", ["r1"])
    await scripts.commit("w1", [RowCommit(seat, 0, pack_tokens([7, 8]))], {})
    end = RowFinish(seat, 2, "finished", "stop", Finished("r1", "stop", 2))
    await scripts.finish("w1", end)
    await scripts.finish("w1", end)

    second = await scripts.accept(metered("r2", quota), DEFAULT_BOUNDS)

    assert second.tokens_left == pytest.approx(600 - 5 - 19, abs=2)


async def test_one_key_pays_nothing_for_another(scripts: Scripts) -> None:
    quota = Quota(requests_per_minute=1)
    await scripts.accept(metered("r1", quota), DEFAULT_BOUNDS)
    other = replace(make.submission("r2", ticket=make.ticket("r2", key_id="other")), quota=quota)

    assert (await scripts.accept(other, DEFAULT_BOUNDS)).is_new
