"""Streams of a stack whose parts a test breaks: started together, watched while they grow, judged at their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from broker import keys
from broker.client.client import Client
from harness.announcements import Told, body_of, listen
from harness.stack import Stack
from harness.wait import PATIENCE_S


class Streams:
    """Clients of one API process that listen at once."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.told: list[Told] = []
        self._readers: list[asyncio.Task[Told]] = []

    def start(self, *texts: str, length: int) -> list[Told]:
        fresh = [Told(text, length) for text in texts]
        self.told += fresh
        self._readers += [asyncio.create_task(listen(self._http, told)) for told in fresh]
        return fresh

    async def grow(self, size: int, told: Sequence[Told] = ()) -> None:
        """Wait until each of them has seen so much, or has ended."""
        waiting = list(told or self.told)
        await until(lambda: all(len(each.seen) >= size or each.end == "done" for each in waiting), waiting)

    async def end(self) -> list[Told]:
        """Wait until all of them have ended."""
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*self._readers)
        return self.told

    async def close(self) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)


@asynccontextmanager
async def streams_of(stack: Stack) -> AsyncIterator[Streams]:
    async with http_of(stack) as http:
        streams = Streams(http)
        try:
            yield streams
        finally:
            await streams.close()


def http_of(stack: Stack, *, timeout_s: float = PATIENCE_S) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(verify=False, base_url=stack.url, timeout=timeout_s, limits=limits)


async def until(is_true: Callable[[], bool], what: object = "") -> None:
    """Poll until something holds."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not is_true():
                await asyncio.sleep(0.01)
    except TimeoutError as error:
        raise AssertionError(f"not in {PATIENCE_S} s: {what}") from error


async def until_async(is_true: Callable[[], Awaitable[bool]], what: object = "") -> None:
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not await is_true():
                await asyncio.sleep(0.02)
    except TimeoutError as error:
        raise AssertionError(f"not in {PATIENCE_S} s: {what}") from error


async def complete(http: httpx.AsyncClient, text: str, length: int) -> httpx.Response:
    """A whole answer."""
    return await http.post("/v1/completions", json=body_of(text, length, stream=False))


async def complete_when_ready(http: httpx.AsyncClient, text: str, length: int) -> str:
    """A whole answer, asked for again while the server says that it cannot."""
    answers: list[httpx.Response] = []

    async def is_answered() -> bool:
        answers.append(await complete(http, text, length))
        return answers[-1].status_code == 200

    await until_async(is_answered, "the server answers again")
    return str(answers[-1].json()["choices"][0]["text"])


async def state_of(client: Client, told: Told, field: str) -> str:
    raw: Any = await client.commands.hget(keys.state(told.request_id), field)
    return raw.decode() if raw is not None else ""
