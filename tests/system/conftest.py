"""A client of a stack of real processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from broker.client import Client
from tests.support.stack import Stack

SCRIPTED = ("--engine", "scripted", "--script-step-s", "0.005", "--lease-s", "1")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """One API process, one former, two workers on the scripted engine, each a process of its own."""
    stack = Stack(workers=2)
    stack.arguments["worker"] = SCRIPTED
    stack.arguments["former"] = ("--lease-s", "1")
    with stack:
        yield stack


@pytest_asyncio.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    client = await Client.open(stack.redis_url)
    yield client
    await client.close()
