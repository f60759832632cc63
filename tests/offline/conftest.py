"""A stack of real processes for the offline tests, with a batch worker; the worker runs the scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from openai import OpenAI

from api.calls.client import TextClient
from broker.client.client import Client
from harness.stack import Stack

WORKER = ("--engine", "scripted", "--script-step-s", "0.002", "--lease-s", "2")


@pytest.fixture(scope="session")
def offline_stack() -> Iterator[Stack]:
    """Shared by all tests of this folder that kill nothing."""
    stack = Stack(workers=1, batchers=1)
    stack.arguments["worker"] = WORKER
    stack.arguments["former"] = ("--lease-s", "2")
    stack.arguments["batcher"] = ("--batch-lease-s", "2")
    with stack:
        yield stack


@pytest.fixture
def openai(offline_stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{offline_stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest_asyncio.fixture
async def client(offline_stack: Stack) -> AsyncIterator[Client]:
    client = await Client.open(offline_stack.redis_url)
    yield client
    await client.close()


@pytest_asyncio.fixture
async def text(offline_stack: Stack) -> AsyncIterator[TextClient]:
    async with await TextClient.open(offline_stack.redis_url) as text:
        yield text
