"""Offline work fills the rows nobody else wants, and gives way. Engine: scripted, in processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from redis import Redis

from broker import keys
from broker.client import Client
from broker.wire import Tokens
from tests.support.scripted import ask, hear
from tests.support.stack import Stack

ROWS = 8
STEP_S = 0.02


@pytest.fixture(scope="module")
def slow() -> Iterator[Stack]:
    """A stack with one worker of eight rows whose cycles take a while."""
    stack = Stack(workers=1, apis=0)
    rows = ("--decode-batch-max", str(ROWS), "--script-step-s", str(STEP_S))
    stack.arguments["worker"] = ("--engine", "scripted", *rows)
    with stack:
        yield stack


@pytest_asyncio.fixture
async def client(slow: Stack) -> AsyncIterator[Client]:
    client = await Client.open(slow.redis_url)
    yield client
    await client.close()


async def first_token_s(client: Client, text: str) -> float:
    asked = ask(text, 10)
    began_s = time.monotonic()
    handle = await client.submit(asked.request, asked.ticket)
    first_s = None
    tokens: list[int] = []
    async for event in handle.events():
        if isinstance(event, Tokens):
            first_s = first_s or time.monotonic() - began_s
            tokens.append(len(event.tokens) // 4)
    assert sum(tokens) == 10
    assert first_s is not None
    return first_s


async def test_interactive_request_finds_a_row_at_once_and_offline_answers_stay_exact(
    slow: Stack, client: Client
) -> None:
    offline = [ask(f"offline {i}", 300, priority="offline") for i in range(2 * ROWS)]
    readers = [asyncio.create_task(hear(await client.submit(each.request, each.ticket))) for each in offline]
    while (await client.registry.workers())[0].free_rows:
        await asyncio.sleep(0.05)

    waits_s = [await first_token_s(client, f"interactive {i}") for i in range(3)]
    heard = await asyncio.gather(*readers)

    # A row takes 300 cycles, so whoever waited for one to end would wait for seconds.
    assert max(waits_s) < 300 * STEP_S / 3
    assert [each.tokens for each in heard] == [each.expected for each in offline]
    # Paused and not handed back: whoever is sent out again has another attempt.
    with Redis.from_url(slow.redis_url) as redis:
        attempts = {redis.hget(keys.state(each.request.id), "attempt") for each in offline}
    assert attempts == {b"1"}
