"""The whole path in real processes, asked with the official client. Engine: scripted."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam
from prometheus_client.parser import text_string_to_metric_families

from harness.stack import Stack
from harness.wait import PATIENCE_S
from tests.api.conftest import http_client

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODEL = "scripted"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
BODY: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "stream": True, "temperature": 0}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack(workers=1, apis=2)
    stack.arguments["worker"] = (
        *("--engine", "scripted", "--script-step-s", "0.002", "--script-tokens-per-step", "1,3,2"),
        *("--max-context-tokens", "8192"),
    )
    stack.arguments["api"] = ("--registry-age-s", "0.1")
    with stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="session")
async def client(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="session")
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with http_client(stack.url, limits=limits) as client:
        yield client


async def streamed(client: AsyncOpenAI, **options: Any) -> str:
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, **options)
    return "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])


async def gauges(http: httpx.AsyncClient) -> dict[str, float]:
    """What runs and waits, by name; counters of lanes are summed."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families((await http.get("/metrics")).text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0) + sample.value
    return sums


async def idle(http: httpx.AsyncClient) -> None:
    """Wait until nothing runs and nothing waits."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = await gauges(http)
            names = ("mtplx_requests_open", "mtplx_queue_requests", "mtplx_rows_active")
            if not any(found.get(name, 0) for name in names) and found["mtplx_rows_free"] == 8:
                return
            await asyncio.sleep(0.05)


async def leave_after(http: httpx.AsyncClient, body: dict[str, Any], *, content_chunks: int) -> None:
    """Ask, read so many chunks of content, and hang up."""
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if content_chunks == 0:
                return
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                content_chunks -= bool(choices and choices[0]["delta"].get("content"))


async def test_whole_and_streamed_answers_are_equal(client: AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=40)

    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 40
    assert await streamed(client, max_tokens=40) == whole.choices[0].message.content


async def test_sixteen_streams_at_once_each_say_the_same(client: AsyncOpenAI) -> None:
    texts = await asyncio.gather(*(streamed(client, max_tokens=60) for _ in range(16)))

    assert len(texts[0]) == 60
    assert len(set(texts)) == 1


async def test_stop_string_ends_the_text_at_the_worker_and_here_alike(
    client: AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=64)
    text = whole.choices[0].message.content or ""
    stop = text[20:24]

    stopped = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=64, stop=stop)

    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens < 30
    assert await streamed(client, max_tokens=64, stop=stop) == text[: text.index(stop)]
    await idle(http)


async def test_usage_is_counted_by_request_when_many_run_together(client: AsyncOpenAI) -> None:
    async def usage(limit: int) -> tuple[int, int]:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=limit, stream=True, stream_options={"include_usage": True}
        )
        last = [chunk async for chunk in stream][-1].usage
        assert last is not None
        return last.prompt_tokens, last.completion_tokens

    found = await asyncio.gather(*(usage(limit) for limit in range(1, 13)))

    assert [completion for _, completion in found] == list(range(1, 13))
    assert len({prompt for prompt, _ in found}) == 1


async def test_storm_of_leavers_leaves_nothing_running(http: httpx.AsyncClient) -> None:
    long = {**BODY, "messages": [{"role": "user", "content": "long " * 200}], "max_tokens": 4096}

    await asyncio.gather(*(leave_after(http, long, content_chunks=0) for _ in range(160)))
    await asyncio.gather(*(leave_after(http, long, content_chunks=1) for _ in range(200)))

    await idle(http)


async def test_two_hundred_one_token_requests_all_get_their_token(http: httpx.AsyncClient) -> None:
    async def ask() -> str:
        answer = await http.post("/v1/chat/completions", json={**BODY, "stream": False, "max_tokens": 1})
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text

    texts = await asyncio.gather(*(ask() for _ in range(200)))

    assert {len(text) for text in texts} == {1}
    await idle(http)


async def test_state_is_answered_while_no_request_moves(
    stack: Stack, client: AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    with stack.engines_held():
        work = [asyncio.create_task(streamed(client, max_tokens=100)) for _ in range(128)]
        while (await gauges(http)).get("mtplx_requests_open", 0) < 128:
            await asyncio.sleep(0.05)

        pages = [await http.get(path) for path in ("/health", "/metrics", "/v1/models")]
        # Nothing could be answered before, so no page stood in line behind a request.
        assert not any(task.done() for task in work)

    assert {page.status_code for page in pages} == {200}
    assert {len(text) for text in await asyncio.gather(*work)} == {100}


async def test_deadline_ends_a_request_with_a_reason_of_its_own(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=8000, extra_headers={"x-mtplx-timeout-ms": "3000"}
    )

    assert str(answer.choices[0].finish_reason) == "deadline"
    assert answer.usage is not None
    assert answer.choices[0].message.content is not None
    assert len(answer.choices[0].message.content) == answer.usage.completion_tokens > 0


async def test_synchronous_client_chats_and_streams(stack: Stack) -> None:
    def ask() -> tuple[str, str, list[str]]:
        with OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
            whole = client.completions.create(model=MODEL, prompt="One", max_tokens=12)
            chunks = list(client.completions.create(model=MODEL, prompt="One", max_tokens=12, stream=True))
            models = [model.id for model in client.models.list()]
        streamed = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        return whole.choices[0].text, streamed, models

    whole, streamed, models = await asyncio.to_thread(ask)

    assert len(whole) == 12
    assert streamed == whole
    assert models == [MODEL]


async def test_errors_arrive_as_the_clients_own_classes(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="none", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
    with pytest.raises(openai.BadRequestError) as too_long:
        await client.completions.create(model=MODEL, prompt="x" * 9000)
    assert too_long.value.code == "context_length_exceeded"


async def test_client_time_out_cancels_the_request(client: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    with pytest.raises(openai.APITimeoutError):
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8000, timeout=0.3)

    await idle(http)


async def test_server_told_to_stop_lets_its_streams_end(stack: Stack) -> None:
    body = {**BODY, "max_tokens": 1500}

    async with http_client(stack.url_of("api-1")) as http:
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            stack.signal("api-1", signal.SIGTERM)
            rest = [line async for line in lines if line.startswith("data: ")]
        status = await asyncio.to_thread(stack.processes["api-1"].wait, PATIENCE_S)
        with pytest.raises(httpx.ConnectError):
            await http.get("/health")

    assert rest[-1] == "data: [DONE]"
    assert status == 0
