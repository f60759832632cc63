"""More clients than rows: proper answers or prompt refusals, an honest Retry-After, headers before the first token.

Real processes; engine: scripted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import pytest_asyncio

from api.fleet.catalog import estimated_wait_s
from broker import keys
from broker.client.client import Client
from broker.former.wait_estimates import lane_name
from harness.announcements import body_of, expected
from harness.scripted import PROFILE
from harness.stack import Stack, connection
from tests.system.breaking import Streams, complete, http_of, streams_of, until, until_async
from workers.scripted_lane import IDENTITY

ROWS, BOUND = 8, 96
CLIENT_TIME_OUT_S = 120.0
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
            answer = await complete(http, f"client {index}", 20)
            if answer.status_code == 200:
                return str(answer.json()["choices"][0]["text"])
            refusals.append(answer)
            await asyncio.sleep(float(answer.headers["retry-after"]))

    async def look() -> None:
        pages = [await http.get(path) for path in ("/health", "/metrics", "/v1/models")]
        assert [page.status_code for page in pages] == [200, 200, 200]

    with narrow.engines_held():
        clients = asyncio.gather(*(insist(i) for i in range(128)))
        await until(lambda: len(refusals) >= 128 - BOUND - ROWS, "the queue is full")
        await look()
        assert not clients.done(), "nothing could be answered meanwhile, so no page waited for an answer"
    while not clients.done():
        await look()
        await asyncio.wait({clients}, timeout=0.2)

    assert await clients == [expected(f"client {i}", 20) for i in range(128)]
    assert {refusal.status_code for refusal in refusals} == {503}


async def test_retry_after_of_a_full_queue_is_the_wait_that_the_former_foresees(
    narrow: Stack, streams: Streams, http: httpx.AsyncClient, client: Client
) -> None:
    """How near the foreseen wait is to the real one is tested without a clock, in `test_wait_estimates.py`."""
    streams.start(*(f"flood {i}" for i in range(BOUND)), length=60)
    await until(lambda: sum(told.end == "done" for told in streams.told) >= 2 * ROWS, "rows change hands")
    foreseen_s, told_s = set[int](), list[int]()

    async def is_told_what_is_foreseen() -> bool:
        foreseen_s.add(math.ceil(await _foreseen_s(client)))
        told_s.append(int((await flood.refusal(ROWS + 1)).headers["retry-after"]))
        return told_s[-1] in foreseen_s

    async with Flood(http) as flood:
        with narrow.engines_held():
            await flood.refusal(BOUND + ROWS + 1)
            await until_async(is_told_what_is_foreseen, (foreseen_s, told_s))

    assert told_s[-1] > 1, "no more than is told where nothing is foreseen"


async def test_request_that_would_wait_past_its_deadline_is_refused_at_once(
    narrow: Stack, streams: Streams, http: httpx.AsyncClient
) -> None:
    streams.start(*(f"before {i}" for i in range(BOUND - 1)), length=60)
    await until(lambda: sum(told.end == "done" for told in streams.told) >= 2 * ROWS, "rows change hands")

    async def is_refused() -> bool:
        body = body_of("impatient", 5, stream=False)
        answer = await http.post("/v1/completions", json=body, headers={"x-mtplx-timeout-ms": "500"})
        return answer.status_code == 503 and "deadline" in answer.json()["error"]["message"]

    with narrow.engines_held():
        await until_async(is_refused, "a wait well past the deadline is foreseen")


async def test_silent_stream_has_headers_at_once_and_comments_until_it_is_lost(
    narrow: Stack, streams: Streams, http: httpx.AsyncClient
) -> None:
    streams.start(*(f"busy {i}" for i in range(ROWS)), length=500)
    await streams.grow(5)
    comments, errors = 0, []

    with narrow.engines_held():
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


class Flood:
    """Clients that ask for more than a queue takes while the engine is held; they leave at its end."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._calls: list[asyncio.Task[httpx.Response]] = []

    async def __aenter__(self) -> Flood:
        return self

    async def __aexit__(self, *_: object) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def refusal(self, more: int) -> httpx.Response:
        """The first refusal of so many more clients, of which the queue cannot take all."""
        fresh = [asyncio.create_task(complete(self._http, f"one too many {i}", 60)) for i in range(more)]
        self._calls += fresh
        answer = await next(asyncio.as_completed(fresh))
        assert answer.status_code == 503
        return answer


async def _foreseen_s(client: Client) -> float:
    """What the former last told of the wait of an interactive request."""
    [former] = [each for each in await client.registry.daemons() if each.kind == "former"]
    return estimated_wait_s(former.fields["snapshot"], lane_name(IDENTITY, PROFILE), "interactive") or 0.0
