"""A worker with the real model is killed in mid-stream; another goes on. Engine: mtp_batch on SmolLM2 with its head."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from broker import keys
from broker.client.client import Client
from broker.wire import unpack_tokens
from harness.chat_prompts import chat_prompt
from harness.stack import Stack
from mtplx_core.engine import SamplingParams
from mtplx_core.models.loader import LoadedModel
from mtplx_core.sampling.audit import audit
from tests.system.breaking import until_async

MODEL = "smollm2-135m"
LENGTH, KILLED_AT = 80, 8
LEASE_S = "2"
QUESTION = "Tell me a long story about a fox and a dog."
SAMPLINGS = (SamplingParams(), SamplingParams(temperature=0.8, top_p=0.95, seed=11))


@pytest.fixture(scope="module")
def real_pair(smollm2: LoadedModel) -> Iterator[Stack]:
    """A worker with the fetched model and the head shipped for it; the second one comes later."""
    stack = Stack()
    stack.arguments["worker"] = ("--decode-batch-max", "2", "--lease-s", LEASE_S)
    stack.arguments["former"] = ("--lease-s", LEASE_S)
    with stack:
        yield stack


@pytest_asyncio.fixture
async def client(real_pair: Stack) -> AsyncIterator[Client]:
    client = await Client.open(real_pair.redis_url)
    yield client
    await client.close()


async def test_answers_are_the_samplers_own_when_their_worker_is_killed_in_mid_stream(
    real_pair: Stack, client: Client, smollm2: LoadedModel
) -> None:
    """Greedy and seeded; an answer is a function of prompt and seed, so the audit compares with the undisturbed one."""
    async with httpx.AsyncClient(verify=False, base_url=real_pair.url, timeout=240) as http:
        asked = [asyncio.create_task(_ask(http, sampling)) for sampling in SAMPLINGS]
        ids = await _ids(client)

        async def have_begun() -> bool:
            return min([await client.commands.strlen(keys.log(each)) for each in ids]) >= KILLED_AT * 4

        await until_async(have_begun, "both have some tokens")
        real_pair.start_one("worker-1")
        real_pair.kill("worker-0")
        answers = await asyncio.gather(*asked)

    assert {await client.commands.hget(keys.state(each), "attempt") for each in ids} == {b"2"}
    prompt = chat_prompt(smollm2, QUESTION)
    for sampling, answer in zip(SAMPLINGS, answers, strict=True):
        tokens = unpack_tokens((await client.read(answer["id"])).tokens)
        assert len(tokens) == LENGTH
        assert answer["usage"]["completion_tokens"] == LENGTH
        result = audit(smollm2.model, prompt, tokens, sampling)
        assert result.passed, result


async def _ask(http: httpx.AsyncClient, sampling: SamplingParams) -> Any:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": LENGTH,
        "ignore_eos": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
    }
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def _ids(client: Client) -> list[str]:
    """The ids of both requests, once they are accepted."""
    found: list[str] = []

    async def are_known() -> bool:
        prefix = keys.state("")
        found[:] = [key.decode().removeprefix(prefix) async for key in client.commands.scan_iter(f"{prefix}*")]
        return len(found) == len(SAMPLINGS)

    await until_async(are_known, "both are accepted")
    return found
