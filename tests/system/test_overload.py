"""More clients than rows: proper answers or prompt refusals, an honest Retry-After, headers before the first token.

Real processes; engine: scripted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from broker import keys
from broker.client import Client
from tests.support.stack import Stack, connection
from tests.support.told import Told, body_of, expected
from tests.system.breaking import Streams, complete, http_of, streams_of, until, until_async

ROWS, BOUND = 8, 96
CLIENT_TIME_OUT_S = 60.0
QUICK_S = 5.0
"""What a state page may take on a machine that has more to do than it can."""
LEASE_S = "2"
"""Short, for the former tells its news five times in each; the same for all, else a worker beats too seldom."""


@pytest.fixture(scope="module")
def narrow() -> Iterator[Stack]:
    """One worker with eight rows, and a queue that holds twelve times as many."""
    stack = Stack()
    script = ("--engine", "scripted", "--script-step-s", "0.01")
    stack.arguments["worker"] = (*script, "--max-context-tokens", "8192", "--lease-s", LEASE_S)
    stack.arguments["api"] = ("--queue-requests-max", str(BOUND), "--keep-alive-s", "0.3", "--registry-age-s", "0.2")
    stack.arguments["former"] = ("--lease-s", LEASE_S)
    with stack:
        yield stack


@pytest_asyncio.fixture
async def streams(narrow: Stack) -> AsyncIterator[Streams]:
    async with streams_of(narrow) as streams:
        yield streams


@pytest_asyncio.fixture
async def http(narrow: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with http_of(narrow, timeout_s=CLIENT_TIME_OUT_S) as http:
        yield http


@pytest_asyncio.fixture
async def client(narrow: Stack) -> AsyncIterator[Client]:
    client = await Client.open(narrow.redis_url)
    yield client
    await client.close()


async def test_every_client_of_an_overloaded_lane_is_answered_or_told_when_to_come_back(
    narrow: Stack, http: httpx.AsyncClient
) -> None:
    refusals: list[httpx.Response] = []

    async def insist(index: int) -> str:
        while True:
            answer = await complete(http, f"client {index}", 60)
            if answer.status_code == 200:
                return str(answer.json()["choices"][0]["text"])
            refusals.append(answer)
            await asyncio.sleep(float(answer.headers["retry-after"]))

    clients = asyncio.gather(*(insist(i) for i in range(128)))
    async with http_of(narrow, timeout_s=QUICK_S) as onlooker:
        while not clients.done():
            pages = [await onlooker.get(path) for path in ("/health", "/metrics", "/v1/models")]
            assert [page.status_code for page in pages] == [200, 200, 200]

    assert await clients == [expected(f"client {i}", 60) for i in range(128)]
    assert refusals, "the queue was never full"
    assert {refusal.status_code for refusal in refusals} == {503}


async def test_retry_after_is_within_twice_the_wait_that_was_measured(
    narrow: Stack, streams: Streams, http: httpx.AsyncClient, client: Client
) -> None:
    flood = asyncio.create_task(_keep_full(streams))
    try:
        await until(lambda: sum(told.end == "done" for told in streams.told) >= 5 * ROWS, "rows change hands")
        refused = await _refusal(http)
        last = next(told for told in reversed(streams.told) if told.request_id)
        waited_s = await _waited_s(client, last)
    finally:
        flood.cancel()

    retry_after_s = int(refused.headers["retry-after"])
    assert waited_s > 2, "too short a wait to tell whole seconds apart"
    assert waited_s / 2 <= retry_after_s <= waited_s * 2


async def test_request_that_would_wait_past_its_deadline_is_refused_at_once(
    streams: Streams, http: httpx.AsyncClient
) -> None:
    streams.start(*(f"before {i}" for i in range(BOUND - 1)), length=200)
    await until(lambda: sum(told.end == "done" for told in streams.told) >= 2 * ROWS, "rows change hands")

    async def is_refused() -> bool:
        body = body_of("impatient", 5, stream=False)
        answer = await http.post("/v1/completions", json=body, headers={"x-mtplx-timeout-ms": "500"})
        return answer.status_code == 503 and "deadline" in answer.json()["error"]["message"]

    await until_async(is_refused, "a wait well past the deadline is foreseen")


async def test_silent_stream_has_headers_at_once_and_comments_until_it_is_lost(
    narrow: Stack, streams: Streams, http: httpx.AsyncClient
) -> None:
    streams.start(*(f"busy {i}" for i in range(ROWS)), length=5000)
    await streams.grow(5)
    comments, errors = 0, []

    async with http.stream("POST", "/v1/completions", json=body_of("waits", 5, stream=True)) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            comments += line.startswith(":")
            errors += [line] if line.startswith("data: ") else []
            if comments == 3:
                with connection(narrow.redis_url) as redis:
                    redis.delete(keys.state(response.headers["x-request-id"]))

    assert comments >= 3
    assert len(errors) == 1
    assert '"lost"' in errors[0]


async def _keep_full(streams: Streams) -> None:
    """A few more requests than the queue takes, all of one length."""
    while True:
        open_ = sum(told.end == "nothing" for told in streams.told)
        streams.start(*(f"flood {len(streams.told) + i}" for i in range(BOUND + ROWS - open_)), length=60)
        await asyncio.sleep(0.05)


async def _refusal(http: httpx.AsyncClient) -> httpx.Response:
    """More at once than rows can become free between two looks of whoever keeps the queue full."""
    calls = [asyncio.create_task(complete(http, f"one too many {i}", 60)) for i in range(3 * ROWS)]
    try:
        for call in asyncio.as_completed(calls):
            if (answer := await call).status_code == 503:
                return answer
    finally:
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    raise AssertionError("the queue was never full")


async def _waited_s(client: Client, told: Told) -> float:
    """From acceptance to the row, as Redis' clock says."""
    fields: list[Any] = []

    async def has_row() -> bool:
        fields[:] = await client.commands.hmget(keys.state(told.request_id), "accepted_ms", "formed_ms")
        return fields[1] is not None

    await until_async(has_row, "the request got a row")
    return (int(fields[1]) - int(fields[0])) / 1000
