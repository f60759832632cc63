"""The official client talks to the real model through the queue, every token audited. Engine: ar_batch on SmolLM2."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from tokenizers import Tokenizer

from broker import keys
from broker.client.client import Client
from broker.wire import decode_events, unpack_tokens
from harness.chat_prompts import chat_prompt
from harness.stack import Stack
from mtplx_core.engine import SamplingParams
from mtplx_core.models.loader import LoadedModel
from mtplx_core.sampling.audit import audit

MODEL = "smollm2-135m"
QUESTIONS = ("What is the capital of France?", "Say a fruit.", "Count from one to five.", "What is snow made of?")


@pytest.fixture(scope="module")
def real_stack(smollm2: LoadedModel) -> Iterator[Stack]:
    """One worker with the fetched model, as `mtplx up` runs it."""
    stack = Stack()
    stack.arguments["worker"] = ("--scheduler-mode", "ar_batch", "--decode-batch-max", "8")
    with stack:
        yield stack


@pytest_asyncio.fixture
async def openai(real_stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{real_stack.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest_asyncio.fixture
async def redis_client(real_stack: Stack) -> AsyncIterator[Client]:
    client = await Client.open(real_stack.redis_url)
    yield client
    await client.close()


async def read_log(client: Client, request_id: str) -> tuple[int, ...]:
    """The very tokens that were streamed to somebody, with the ending token."""
    found = await client.read(request_id)
    assert found.status == "finished"
    return unpack_tokens(found.tokens)


async def ask(client: AsyncOpenAI, question: str, **options: Any) -> tuple[str, str]:
    """A streamed answer, with its id."""
    messages: Any = [{"role": "user", "content": question}]
    stream = await client.chat.completions.create(model=MODEL, messages=messages, stream=True, **options)
    parts, name = [], ""
    async for chunk in stream:
        name = chunk.id
        parts += [choice.delta.content or "" for choice in chunk.choices]
    return name, "".join(parts)


async def test_sixteen_chats_at_once_each_get_the_samplers_own_tokens(
    openai: AsyncOpenAI, redis_client: Client, smollm2: LoadedModel
) -> None:
    tokenizer = Tokenizer.from_buffer(smollm2.tokenizer_files["tokenizer.json"])
    asked = [
        (QUESTIONS[i % 4], SamplingParams() if i % 2 else SamplingParams(temperature=0.8, top_p=0.9, seed=i))
        for i in range(16)
    ]
    heard = await asyncio.gather(
        *(
            ask(openai, question, max_tokens=6, temperature=s.temperature, top_p=s.top_p, seed=s.seed)
            for question, s in asked
        )
    )

    said = set()
    for (question, sampling), (request_id, text) in zip(asked, heard, strict=True):
        tokens = await read_log(redis_client, request_id)
        assert text == tokenizer.decode(tokens)
        said.add((question, sampling, tokens))
    for question, sampling, tokens in said:
        result = audit(smollm2.model, chat_prompt(smollm2, question), tokens, sampling)
        assert result.passed, (question, result)


async def test_whole_answer_names_the_capital_and_counts_its_tokens(openai: AsyncOpenAI, redis_client: Client) -> None:
    messages: Any = [{"role": "user", "content": QUESTIONS[0]}]

    whole = await openai.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=16)

    assert (whole.choices[0].message.content or "").startswith("The capital of France is Paris.")
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(await read_log(redis_client, whole.id))
    raw: Any = await redis_client.commands.hget(keys.state(whole.id), "end")
    assert decode_events(raw)[0].id == whole.id
