"""A worker over sliding windows is killed in mid-stream; another goes on. Engine: mtp_batch, tiny random gpt-oss."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from broker import keys
from broker.client.client import Client
from broker.wire import unpack_tokens
from harness.families.checkpoints import write_checkpoint
from harness.families.sizes import CONTEXT, WINDOW
from harness.stack import Stack
from mtplx_core.engine import SamplingParams
from mtplx_core.models.loader import load_model
from mtplx_core.sampling.audit import audit
from tests.system.breaking import until_async

FAMILY = "gpt_oss"
LEASE_S = "2"
PROMPT = [10, 20, 30, 40]
LENGTH, KILLED_AT = CONTEXT - len(PROMPT), 5 * WINDOW
SAMPLINGS = (SamplingParams(), SamplingParams(temperature=0.8, seed=11))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mtplx-", dir="/tmp") as name:
        yield write_checkpoint(Path(name) / FAMILY, FAMILY)


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[Stack]:
    """A worker; the second one comes later."""
    stack = Stack()
    stack.arguments["worker"] = ("--model", str(folder), "--lease-s", LEASE_S)
    stack.arguments["former"] = ("--lease-s", LEASE_S)
    with stack:
        yield stack


@pytest_asyncio.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    client = await Client.open(stack.redis_url)
    yield client
    await client.close()


async def test_windows_are_filled_again_where_an_answer_goes_on(stack: Stack, client: Client, folder: Path) -> None:
    async with httpx.AsyncClient(base_url=stack.url, timeout=240) as http:
        asked = [asyncio.create_task(_ask(http, sampling)) for sampling in SAMPLINGS]
        await until_async(lambda: _are_under_way(client), "both have filled their windows")
        stack.kill("worker-0")
        stack.start_one("worker-1")
        answers = await asyncio.gather(*asked)

    loaded = load_model(folder)
    for sampling, answer in zip(SAMPLINGS, answers, strict=True):
        assert await client.commands.hget(keys.state(answer["id"]), "attempt") == b"2"
        tokens = unpack_tokens((await client.read(answer["id"])).tokens)
        assert len(tokens) == LENGTH
        result = audit(loaded.model, PROMPT, tokens, sampling)
        assert result.passed, result


async def _ask(http: httpx.AsyncClient, sampling: SamplingParams) -> Any:
    body = {
        "model": FAMILY,
        "prompt": PROMPT,
        "max_tokens": LENGTH,
        "ignore_eos": True,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
    }
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def _are_under_way(client: Client) -> bool:
    prefix = keys.state("")
    ids = [key.decode().removeprefix(prefix) async for key in client.commands.scan_iter(f"{prefix}*")]
    sizes = [await client.commands.strlen(keys.log(each)) for each in ids]
    return len(sizes) == len(SAMPLINGS) and min(sizes) >= KILLED_AT * 4
