"""The former, step by step with a fake clock. Engine: none; Redis: all three servers."""

from __future__ import annotations

from redis.asyncio import Redis

from broker.former import Former
from broker.scripts import DEFAULT_BOUNDS, Scripts
from broker.wire import Seat
from tests.support import factories as make
from tests.support.reads import read_jobs


async def test_former_sends_what_waits_to_a_free_worker(former: Former, scripts: Scripts, client: Redis) -> None:
    await scripts.register(make.registration("w1"))
    await scripts.accept(make.submission("r1"), DEFAULT_BOUNDS)

    sent = await former.step()

    assert sent == 1
    assert await read_jobs(client, "w1") == [[Seat("r1", 1)]]
