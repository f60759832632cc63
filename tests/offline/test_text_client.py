"""Programs that enqueue text themselves. Engine: scripted, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from api.calls.client import QueueOptions, TextClient
from api.errors import BadRequestError, ModelNotFoundError
from api.openai.schemas import Chat, Completion
from broker.client.client import Client
from broker.errors import QueueFullError, UnknownRequestError
from broker.scripts import Bounds
from harness.scripted import ask
from harness.stack import Stack
from workers.scripted_lane import NAME, encode_text


def text_of(tokens: tuple[int, ...]) -> str:
    """The scripted lane plays printable ASCII."""
    by_token = {token: chr(code) for code in range(0x20, 0x7F) for token in encode_text(chr(code))}
    return "".join(by_token[token] for token in tokens)


async def test_prompt_gets_its_completion(text: TextClient) -> None:
    call = await text.complete("Once upon", model=NAME, max_tokens=16)

    answer = await call.wait()

    assert isinstance(answer, Completion)
    assert answer.choices[0].text == text_of(ask("Once upon", 16).expected)
    assert answer.choices[0].finish_reason == "length"


async def test_conversation_gets_its_answer(text: TextClient) -> None:
    call = await text.chat([{"role": "user", "content": "Hello"}], model=NAME, max_tokens=8)

    answer = await call.wait()

    assert isinstance(answer, Chat)
    assert answer.id == call.id
    assert len(answer.choices[0].message.content) == 8
    assert answer.usage.completion_tokens == 8


async def test_text_streams_as_it_comes(text: TextClient) -> None:
    call = await text.complete("stream", model=NAME, max_tokens=30)

    parts = [delta.text async for delta in call.stream()]

    assert "".join(parts) == text_of(ask("stream", 30).expected)


async def test_answer_is_fetched_later_by_another_client(text: TextClient, offline_stack: Stack) -> None:
    call = await text.complete(["one", "two"], model=NAME, max_tokens=6)

    async with await TextClient.open(offline_stack.redis_url) as other:
        answer = await (await other.fetch(call.id)).wait()

    assert isinstance(answer, Completion)
    assert [choice.text for choice in answer.choices] == [text_of(ask(prompt, 6).expected) for prompt in ("one", "two")]
    assert answer == await call.wait()


async def test_call_asked_again_under_its_idempotency_key_is_the_same_call(text: TextClient) -> None:
    terms = QueueOptions(idempotency_key="text-client-1")
    first = await text.complete("again", model=NAME, max_tokens=6, n=2, terms=terms)

    second = await text.complete("again", model=NAME, max_tokens=6, n=2, terms=terms)

    assert second.id == first.id
    assert await second.wait() == await (await text.fetch(first.id)).wait()


async def test_cancelled_call_ends(text: TextClient) -> None:
    call = await text.complete("endless", model=NAME, max_tokens=1900)

    await call.cancel()
    answer = await (await text.fetch(call.id)).wait()

    assert answer.choices[0].finish_reason == "cancelled"


async def test_call_refused_half_way_is_whole_when_it_is_asked_for_again(
    text: TextClient, offline_stack: Stack
) -> None:
    terms = QueueOptions(call_id="half-way")
    async with TextClient(await Client.open(offline_stack.redis_url, bounds=Bounds(requests=1))) as narrow:
        with pytest.raises(QueueFullError):
            await narrow.complete("half", model=NAME, max_tokens=300, n=2, terms=terms)

    answer = await (await text.complete("half", model=NAME, max_tokens=300, n=2, terms=terms)).wait()

    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]


async def test_unknown_call_is_named(text: TextClient) -> None:
    with pytest.raises(UnknownRequestError, match="cmpl-nothing"):
        await text.fetch("cmpl-nothing")


async def test_unknown_model_is_refused(text: TextClient) -> None:
    with pytest.raises(ModelNotFoundError):
        await text.complete("x", model="nobody")


async def test_wrong_field_is_refused_by_name(text: TextClient) -> None:
    with pytest.raises(BadRequestError, match="temperature"):
        await text.complete("x", model=NAME, temperature=7)


def test_text_client_needs_no_web_framework_and_no_mlx() -> None:
    program = "import sys, api.calls.client; print({'litestar', 'uvicorn', 'mlx', 'rq'} & set(sys.modules))"

    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert said.stdout.strip() == "set()"
