"""Client behaviour that breaks servers: leaving in prefill, joining late, too long. Real daemons; engine: scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import pytest_asyncio

from broker import keys
from broker.client.client import Client
from broker.wire import Finished, Progress
from harness.scripted import ask, hear
from harness.stack import Stack
from harness.wait import PATIENCE_S

CHUNK = 32
BUDGET = 3000


@pytest.fixture(scope="module")
def slow_stack() -> Iterator[Stack]:
    """A worker whose prefill takes its time, with less memory than context."""
    stack = Stack()
    stack.arguments["worker"] = (
        *("--engine", "scripted", "--script-step-s", "0.005", "--script-prefill-token-s", "0.001"),
        *("--prefill-chunk-tokens", str(CHUNK), "--max-context-tokens", "8192", "--token-budget", str(BUDGET)),
    )
    stack.arguments["api"] = ("--registry-age-s", "0.1")
    with stack:
        yield stack


@pytest_asyncio.fixture
async def slow_client(slow_stack: Stack) -> AsyncIterator[Client]:
    client = await Client.open(slow_stack.redis_url)
    yield client
    await client.close()


async def test_prefill_stops_at_the_next_chunk_when_its_client_leaves(slow_client: Client) -> None:
    wanted = ask("p" * 2000, 100)
    handle = await slow_client.submit(wanted.request, wanted.ticket)
    progress = await anext(event async for event in handle.events() if isinstance(event, Progress))

    await handle.abandon()
    end = await hear(slow_client.attach(wanted.request.id))

    assert progress.done < progress.total == 2000
    assert end.tokens == ()
    assert end.end == Finished(wanted.request.id, "cancelled", 0, -1, "client")


async def test_running_row_is_not_held_up_by_a_long_prompt_that_leaves(slow_client: Client) -> None:
    running, leaving = ask("runs", 60), ask("l" * 2000, 100)
    reading = asyncio.create_task(hear(await slow_client.submit(running.request, running.ticket)))
    handle = await slow_client.submit(leaving.request, leaving.ticket)
    await anext(event async for event in handle.events() if isinstance(event, Progress))

    await handle.abandon()

    assert (await reading).tokens == running.expected


async def test_late_request_ends_while_the_early_one_still_runs(slow_client: Client) -> None:
    early, late = ask("early", 2000), ask("late", 8)
    first = await slow_client.submit(early.request, early.ticket)
    while not await slow_client.commands.strlen(keys.log(early.request.id)):
        await asyncio.sleep(0.01)

    heard = await hear(await slow_client.submit(late.request, late.ticket))

    assert heard.tokens == late.expected
    assert await slow_client.commands.hget(keys.state(early.request.id), "status") == b"running"
    await first.abandon()


@pytest.mark.parametrize(
    ("length", "code"), [(9000, "context_length_exceeded"), (BUDGET + 500, "context_length_exceeded")],
    ids=["beyond the context", "within the context and beyond the memory"],
)  # fmt: skip
async def test_prompt_that_cannot_run_is_refused_before_it_is_queued(slow_stack: Stack, length: int, code: str) -> None:
    async with httpx.AsyncClient(verify=False, base_url=slow_stack.url, timeout=PATIENCE_S) as http:
        refused = await http.post("/v1/completions", json={"model": "scripted", "prompt": "x" * length})
        taken = await http.post("/v1/completions", json={"model": "scripted", "prompt": "x", "max_tokens": 3})

    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == code
    assert taken.status_code == 200


async def test_completion_that_does_not_fit_the_memory_is_clamped_visibly(slow_stack: Stack) -> None:
    async with httpx.AsyncClient(verify=False, base_url=slow_stack.url, timeout=60) as http:
        body = {"model": "scripted", "prompt": "x" * (BUDGET - 10), "max_tokens": 500}
        answer = await http.post("/v1/completions", json=body)

    assert answer.status_code == 200
    assert answer.headers["x-mtplx-max-tokens"] == "10"
    assert answer.json()["usage"]["completion_tokens"] == 10
