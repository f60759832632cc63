"""A client of a stack of real processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import pytest_asyncio

from broker.client.client import Client
from harness.stack import Stack
from tests.system.breaking import Streams, http_of, streams_of

LEASE_S = "2"
"""Short, and long enough for a machine with more to do than two cores can."""
SCRIPTED = ("--engine", "scripted", "--script-step-s", "0.005", "--lease-s", LEASE_S)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """One API process, one former, two workers on the scripted engine, each a process of its own."""
    stack = Stack(workers=2)
    stack.arguments["worker"] = SCRIPTED
    stack.arguments["former"] = ("--lease-s", LEASE_S)
    with stack:
        yield stack


@pytest_asyncio.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    client = await Client.open(stack.redis_url)
    yield client
    await client.close()


@pytest_asyncio.fixture
async def streams(stack: Stack) -> AsyncIterator[Streams]:
    async with streams_of(stack) as streams:
        yield streams


@pytest_asyncio.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with http_of(stack) as http:
        yield http
