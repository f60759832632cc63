"""POST /v1/chat/completions with the official client. Engine: none (the queue is a fake)."""

from __future__ import annotations

import pytest
from openai import AsyncOpenAI
from openai.types.chat import (
    ChatCompletionChunk,
    ChatCompletionContentPartTextParam,
    ChatCompletionMessageParam,
)

from broker.wire import Stats, unpack_tokens
from tests.api.fake import NAME, FakeBackend, Script, encode

pytestmark = pytest.mark.asyncio(loop_scope="session")

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


async def collect(openai: AsyncOpenAI, **options: object) -> list[ChatCompletionChunk]:
    stream = await openai.chat.completions.create(model=NAME, messages=MESSAGES, stream=True, **options)  # type: ignore[call-overload]
    return [chunk async for chunk in stream]


def text_of(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


async def test_chat_answers_with_the_models_text(openai: AsyncOpenAI) -> None:
    answer = await openai.chat.completions.create(model=NAME, messages=MESSAGES)

    assert answer.choices[0].message.content == "Hello, world!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == NAME


async def test_chat_counts_usage_with_the_ending_token(openai: AsyncOpenAI, backend: FakeBackend) -> None:
    answer = await openai.chat.completions.create(model=NAME, messages=MESSAGES)

    prompt = len(unpack_tokens(backend.requests[0].prompt))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == prompt
    assert answer.usage.completion_tokens == len(encode("Hello, world!")) + 1
    assert answer.usage.total_tokens == prompt + answer.usage.completion_tokens


async def test_chat_renders_the_template_without_adding_special_tokens(
    openai: AsyncOpenAI, backend: FakeBackend
) -> None:
    await openai.chat.completions.create(model=NAME, messages=MESSAGES)

    expected = encode("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert list(unpack_tokens(backend.requests[0].prompt)) == expected


async def test_stream_opens_with_the_role_and_ends_with_one_reason(openai: AsyncOpenAI) -> None:
    chunks = await collect(openai)

    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1


async def test_stream_says_the_same_as_the_whole_answer(openai: AsyncOpenAI, backend: FakeBackend) -> None:
    backend.script = lambda _: Script(text="Füchse 漢字 😀 über", step=2)

    whole = await openai.chat.completions.create(model=NAME, messages=MESSAGES)
    chunks = await collect(openai)

    assert text_of(chunks) == whole.choices[0].message.content == "Füchse 漢字 😀 über"


async def test_stream_ends_with_usage_when_asked(openai: AsyncOpenAI) -> None:
    whole = await openai.chat.completions.create(model=NAME, messages=MESSAGES)

    chunks = await collect(openai, stream_options={"include_usage": True})

    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_stop_string_inside_one_step_is_never_shown(openai: AsyncOpenAI, backend: FakeBackend) -> None:
    backend.script = lambda _: Script(text="The quick brown fox jumps", step=50)

    chunks = await collect(openai, stop=["own fox"])

    assert text_of(chunks) == "The quick br"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_n_choices_are_n_requests_with_seeds_of_their_own(openai: AsyncOpenAI, backend: FakeBackend) -> None:
    answer = await openai.chat.completions.create(model=NAME, messages=MESSAGES, n=3, seed=7)

    seeds = [seed for _, _, seed, _ in backend.submitted]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3 * (len(encode("Hello, world!")) + 1)


async def test_n_streamed_choices_each_end_once(openai: AsyncOpenAI) -> None:
    chunks = await collect(openai, n=3)

    for index in range(3):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in mine) == "Hello, world!"
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["stop"]


async def test_usage_tells_how_many_drafts_were_accepted(openai: AsyncOpenAI, backend: FakeBackend) -> None:
    stats = Stats(cycles=4, drafted=(4, 2), accepted=(3, 1), min_width=2, max_width=5)
    backend.script = lambda _: Script(stats=stats)

    answer = await openai.chat.completions.create(model=NAME, messages=MESSAGES, n=2)

    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (8, 4)
    assert answer.usage.model_dump()["mtplx"] == {
        "cycles": 8,
        "drafted": [8, 4],
        "accepted": [6, 2],
        "min_width": 2,
        "max_width": 5,
    }


async def test_messages_in_parts_are_joined(openai: AsyncOpenAI, backend: FakeBackend) -> None:
    parts: list[ChatCompletionContentPartTextParam] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    await openai.chat.completions.create(model=NAME, messages=[{"role": "user", "content": parts}])

    expected = encode("<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n")
    assert list(unpack_tokens(backend.requests[0].prompt)) == expected


async def test_a_developer_is_a_system_where_the_template_knows_none(openai: AsyncOpenAI, backend: FakeBackend) -> None:
    await openai.chat.completions.create(model=NAME, messages=[{"role": "developer", "content": "Be brief"}])

    expected = encode("<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>assistant\n")
    assert list(unpack_tokens(backend.requests[0].prompt)) == expected
