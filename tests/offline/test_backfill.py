"""Offline work fills the rows nobody else wants, and gives way. Engine: scripted, in processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from broker import keys
from broker.client.client import Client
from harness.scripted import Ask, ask, hear
from harness.stack import Stack
from harness.wait import wait_until

ROWS = 8
STEP_S = 0.01


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


async def stamps(client: Client, asked: Sequence[Ask], field: str) -> list[int]:
    """When something happened to each request, by Redis' clock; 0: it has not."""
    raw: Any = [await client.commands.hget(keys.state(each.request.id), field) for each in asked]
    return [int(each or 0) for each in raw]


async def test_interactive_request_finds_a_row_at_once_and_offline_answers_stay_exact(
    slow: Stack, client: Client
) -> None:
    offline = [ask(f"offline {i}", 300, priority="offline") for i in range(2 * ROWS)]
    interactive = [ask(f"interactive {i}", 10) for i in range(3)]

    async def rows_are_taken() -> bool:
        return sum(map(bool, await stamps(client, offline, "formed_ms"))) == ROWS

    async def all_have_rows() -> bool:
        return 0 not in await stamps(client, interactive, "formed_ms")

    with slow.engines_held():
        readers = [asyncio.create_task(hear(await client.submit(each.request, each.ticket))) for each in offline]
        await wait_until(rows_are_taken, "offline requests have all rows")
        readers += [asyncio.create_task(hear(await client.submit(each.request, each.ticket))) for each in interactive]
        await wait_until(all_have_rows, "no row could end, and yet they were sent to one")
    heard = await asyncio.gather(*readers)

    assert [each.tokens for each in heard] == [each.expected for each in (*offline, *interactive)]
    assert max(await stamps(client, interactive, "ended_ms")) < min(await stamps(client, offline, "ended_ms"))
    # Paused and not handed back: whoever is sent out again has another attempt.
    assert set(await stamps(client, offline, "attempt")) == {1}
