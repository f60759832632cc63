"""A stack of real processes for the offline tests: one API, one former, one worker on the scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from api.text_client import TextClient
from broker.client import Client
from tests.support.stack import Stack


@pytest.fixture(scope="session")
def offline_stack() -> Iterator[Stack]:
    """Shared by all tests of this folder that kill nothing."""
    stack = Stack(workers=1)
    stack.arguments["worker"] = ("--engine", "scripted", "--script-step-s", "0.002", "--lease-s", "1")
    stack.arguments["former"] = ("--lease-s", "1")
    with stack:
        yield stack


@pytest_asyncio.fixture
async def client(offline_stack: Stack) -> AsyncIterator[Client]:
    client = await Client.open(offline_stack.redis_url)
    yield client
    await client.close()


@pytest_asyncio.fixture
async def text(offline_stack: Stack) -> AsyncIterator[TextClient]:
    async with await TextClient.open(offline_stack.redis_url) as text:
        yield text
