"""Chat logprobs: one entry for each token of the text, and none for what the text does not show. Engine: none."""

from __future__ import annotations

import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionTokenLogprob

from tests.api.fake import NAME, FakeBackend, Script, encode

pytestmark = pytest.mark.asyncio(loop_scope="session")

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


async def streamed(openai: AsyncOpenAI, **options: object) -> list[ChatCompletionTokenLogprob]:
    stream = await openai.chat.completions.create(  # type: ignore[call-overload]  # options vary by test
        model=NAME, messages=MESSAGES, stream=True, logprobs=True, **options
    )
    chunks = [chunk async for chunk in stream]
    found = [choice.logprobs.content for chunk in chunks for choice in chunk.choices if choice.logprobs]
    return [entry for content in found for entry in content or []]


async def test_logprobs_are_absent_when_not_asked_for(openai: AsyncOpenAI) -> None:
    answer = await openai.chat.completions.create(model=NAME, messages=MESSAGES)

    assert answer.choices[0].logprobs is None


async def test_logprobs_follow_the_text_and_leave_the_ending_token_out(openai: AsyncOpenAI) -> None:
    answer = await openai.chat.completions.create(model=NAME, messages=MESSAGES, logprobs=True, top_logprobs=2)

    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    content = logprobs.content or []
    assert "".join(entry.token for entry in content) == "Hello, world!"
    assert b"".join(bytes(entry.bytes or []) for entry in content) == b"Hello, world!"
    assert all(len(entry.top_logprobs) == 2 for entry in content)


async def test_logprobs_streamed_are_those_of_the_whole_answer(openai: AsyncOpenAI, backend: FakeBackend) -> None:
    backend.script = lambda _: Script(text="Füchse 漢字 😀", step=2)

    whole = await openai.chat.completions.create(model=NAME, messages=MESSAGES, logprobs=True)

    assert whole.choices[0].logprobs is not None
    assert await streamed(openai) == whole.choices[0].logprobs.content


async def test_logprobs_show_no_token_of_a_stop_string(openai: AsyncOpenAI, backend: FakeBackend) -> None:
    backend.script = lambda _: Script(text="one STOP two")

    shown = await streamed(openai, stop="STOP")

    assert "".join(entry.token for entry in shown) == "one "


async def test_logprobs_keep_special_tokens_that_do_not_end_the_text(openai: AsyncOpenAI, backend: FakeBackend) -> None:
    backend.script = lambda _: Script(text="a<|endoftext|>b")

    shown = await streamed(openai, max_tokens=3)

    assert [entry.token for entry in shown] == ["a", "<|endoftext|>", "b"]


async def test_the_ending_token_counts_when_eos_is_ignored_and_length_ends_the_text(
    openai: AsyncOpenAI, backend: FakeBackend
) -> None:
    length = len(encode("Hello, world!")) + 1
    backend.script = lambda _: Script(reason="length")

    shown = await streamed(openai, max_tokens=length, extra_body={"ignore_eos": True})

    assert len(shown) == length
    assert shown[-1].token == "<|im_end|>"


async def test_pieces_of_a_character_have_their_own_bytes_and_the_last_its_name(
    openai: AsyncOpenAI, backend: FakeBackend
) -> None:
    backend.script = lambda _: Script(text="a漢😀")

    shown = await streamed(openai, top_logprobs=1)

    assert "".join(entry.token for entry in shown) == "a漢😀"
    assert b"".join(bytes(entry.bytes or []) for entry in shown) == "a漢😀".encode()
    assert all(entry.top_logprobs[0].token == entry.token for entry in shown)
    assert all(entry.top_logprobs[0].bytes == entry.bytes for entry in shown)
    assert "\ufffd" not in "".join(entry.token for entry in shown)


async def test_tokens_of_half_a_character_at_the_end_have_bytes_and_no_name(
    openai: AsyncOpenAI, backend: FakeBackend
) -> None:
    backend.script = lambda _: Script(text="a😀")

    shown = await streamed(openai, max_tokens=2)

    assert [entry.token for entry in shown] == ["a", ""]
    assert bytes(shown[1].bytes or []) == "😀".encode()[: len(shown[1].bytes or [])] != b""
