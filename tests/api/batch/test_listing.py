"""Lists of batches whose records have partly expired. Engine: none (a fake queue), with a child `redis-server`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from redis.asyncio import Redis

from broker import keys
from broker.batches import BatchDesk
from harness.redis_servers import ChildServer, child_server
from tests.api.conftest import api_config, openai_client, serving
from tests.api.fake import FakeBackend

FIELDS: dict[str, str | int] = {
    "key_id": "",
    "endpoint": "/v1/completions",
    "input_file_id": "file-1",
    "completion_window": "1h",
}


@pytest.fixture
def server() -> Iterator[ChildServer]:
    with child_server("redis") as server:
        yield server


@pytest_asyncio.fixture
async def client(server: ChildServer) -> AsyncIterator[Redis]:
    client = server.client()
    yield client
    await client.aclose()


@pytest.fixture
def desk(client: Redis) -> BatchDesk:
    return BatchDesk(client)


@pytest_asyncio.fixture
async def openai(server: ChildServer, tmp_path: Path) -> AsyncIterator[AsyncOpenAI]:
    config = api_config(redis_url=server.url, files_url=str(tmp_path))
    async with serving(FakeBackend(), config) as url, openai_client(url) as openai:
        yield openai


async def begin(desk: BatchDesk, count: int) -> list[str]:
    """New batches, oldest first."""
    made = [f"batch-{place:03}" for place in range(count)]
    for batch_id in made:
        await desk.new_batch(batch_id, FIELDS, window_s=3600, keep_s=60)
    return made


async def expire(client: Redis, batch_ids: list[str]) -> None:
    """As if the time of their records were over."""
    await client.delete(*(keys.batch(batch_id) for batch_id in batch_ids))


async def listed(client: Redis) -> list[str]:
    """What Redis has in the list, oldest first."""
    return [each.decode() for each in await cast("Any", client.zrange(keys.batches(""), 0, -1))]


async def test_page_goes_on_past_expired_batches_until_it_is_full(
    desk: BatchDesk, client: Redis, openai: AsyncOpenAI
) -> None:
    made = await begin(desk, 10)
    await expire(client, made[3:])

    page = await openai.batches.list(limit=2)

    assert [batch.id for batch in page.data] == [made[2], made[1]]
    assert page.has_more


async def test_paging_client_sees_every_batch_that_still_exists_once(
    desk: BatchDesk, client: Redis, openai: AsyncOpenAI
) -> None:
    made = await begin(desk, 40)
    kept = made[::7]
    await expire(client, [batch_id for batch_id in made if batch_id not in kept])

    seen = [batch.id async for batch in openai.batches.list(limit=2)]

    assert seen == kept[::-1]
    assert await listed(client) == kept


async def test_list_of_nothing_but_expired_batches_is_empty_and_ends(
    desk: BatchDesk, client: Redis, openai: AsyncOpenAI
) -> None:
    await expire(client, await begin(desk, 7))

    page = await openai.batches.list(limit=2)

    assert (page.data, page.has_more) == ([], False)
    assert await listed(client) == []


async def test_list_does_not_grow_where_batches_come_and_expire_and_nobody_lists_them(
    desk: BatchDesk, client: Redis
) -> None:
    lengths = []
    for place in range(20):
        batch_id = f"batch-{place:03}"
        await desk.new_batch(batch_id, FIELDS, window_s=3600, keep_s=60)
        lengths.append(len(await listed(client)))
        await expire(client, [batch_id])

    assert set(lengths) == {1}


async def test_batch_that_still_exists_stays_listed_when_others_begin(desk: BatchDesk, client: Redis) -> None:
    made = await begin(desk, 12)

    assert await listed(client) == made


async def test_expired_batch_is_open_no_longer(desk: BatchDesk, client: Redis) -> None:
    made = await begin(desk, 3)
    await expire(client, made[:2])

    found = await desk.open_batches()

    assert [record.id for record in found] == made[2:]
    assert await cast("Any", client.smembers(keys.OPEN_BATCHES)) == {made[2].encode()}
