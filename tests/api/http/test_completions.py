"""POST /v1/completions with the official client. Engine: none (the queue is a fake)."""

from __future__ import annotations

import pytest
from openai import AsyncOpenAI

from broker.wire import unpack_tokens
from tests.api.fake import NAME, FakeBackend, Script, encode

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_completion_continues_a_text(openai: AsyncOpenAI, backend: FakeBackend) -> None:
    answer = await openai.completions.create(model=NAME, prompt="The quick")

    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == "Hello, world!"
    assert answer.choices[0].finish_reason == "stop"
    assert list(unpack_tokens(backend.requests[0].prompt)) == encode("The quick")


async def test_completion_takes_token_ids(openai: AsyncOpenAI, backend: FakeBackend) -> None:
    await openai.completions.create(model=NAME, prompt=[5, 6, 7])

    assert unpack_tokens(backend.requests[0].prompt) == (5, 6, 7)


@pytest.mark.parametrize("prompt", [["one", "two"], [[5, 6], [7]]], ids=["texts", "token ids"])
async def test_completion_answers_several_prompts_in_order(
    openai: AsyncOpenAI, backend: FakeBackend, prompt: list[str] | list[list[int]]
) -> None:
    backend.script = lambda request: Script(text=str(len(backend.submitted)))

    answer = await openai.completions.create(model=NAME, prompt=prompt, n=2)

    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "1"), (1, "2"), (2, "3"), (3, "4")]
    prompts = [request.prompt for request in backend.requests]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]


async def test_completion_stream_says_the_same_as_the_whole_answer(openai: AsyncOpenAI) -> None:
    whole = await openai.completions.create(model=NAME, prompt="The", max_tokens=3)
    stream = await openai.completions.create(
        model=NAME, prompt="The", max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    assert chunks[-1].usage == whole.usage


async def test_completion_logprobs_name_each_token_and_its_place(openai: AsyncOpenAI) -> None:
    answer = await openai.completions.create(model=NAME, prompt="The", logprobs=2)

    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == "Hello, world!"
    assert logprobs.token_logprobs == [-0.5] * len(logprobs.tokens)
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[1] == len(logprobs.tokens[0])
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0][logprobs.tokens[0]] == -0.5


@pytest.mark.parametrize("text", ["a漢字b", "漢字", "Füchse 😀😀 und", "a <|endoftext|>漢b", "\u0301a"])
async def test_offsets_are_places_in_the_text(openai: AsyncOpenAI, backend: FakeBackend, text: str) -> None:
    backend.script = lambda _: Script(text=text)

    answer = await openai.completions.create(model=NAME, prompt="The", logprobs=2)

    choice = answer.choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    names, offsets = logprobs.tokens or [], logprobs.text_offset or []
    shown = [(name, offset) for name, offset in zip(names, offsets, strict=True) if name != "<|endoftext|>"]
    assert choice.text == text.replace("<|endoftext|>", "")
    assert "".join(name for name, _ in shown) == choice.text
    assert all(choice.text[offset:].startswith(name) for name, offset in shown)
    assert [b"".join(map(bytes, logprobs.model_dump()["bytes"]))] == [text.encode()]


async def test_piece_of_a_character_is_named_when_the_character_is_whole(
    openai: AsyncOpenAI, backend: FakeBackend
) -> None:
    tokens = encode("😀")
    backend.script = lambda _: Script(text="😀")

    answer = await openai.completions.create(model=NAME, prompt="The", logprobs=1)

    logprobs = answer.choices[0].logprobs
    assert len(tokens) > 1
    assert logprobs is not None
    assert logprobs.tokens == [""] * (len(tokens) - 1) + ["😀"]
    assert logprobs.text_offset == [0] * len(tokens)
    assert logprobs.top_logprobs == [{name: -0.5} for name in logprobs.tokens]


async def test_completion_logprobs_streamed_are_those_of_the_whole_answer(
    openai: AsyncOpenAI, backend: FakeBackend
) -> None:
    backend.script = lambda _: Script(text="a漢 😀<|endoftext|>b", step=3)

    whole = await openai.completions.create(model=NAME, prompt="The", logprobs=2)
    stream = await openai.completions.create(model=NAME, prompt="The", logprobs=2, stream=True)
    parts = [choice.logprobs async for chunk in stream for choice in chunk.choices if choice.logprobs]

    expected = whole.choices[0].logprobs
    assert expected is not None
    for field, values in expected.model_dump().items():
        assert [value for part in parts for value in part.model_dump()[field]] == values


async def test_sampling_fields_reach_the_queue(openai: AsyncOpenAI, backend: FakeBackend) -> None:
    await openai.completions.create(
        model=NAME,
        prompt="The",
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"7": -5, "5": 3},
        stop=["a", "b"],
        extra_body={
            "top_k": 7,
            "min_p": 0.05,
            "repetition_penalty": 1.2,
            "stop_token_ids": [9],
            "ignore_eos": True,
        },
    )

    request = backend.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.05)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.1, 0.2, 1.2)
    assert sampling.logit_bias == ((5, 3.0), (7, -5.0))
    assert (request.stop, request.stop_token_ids, request.ignore_eos) == ((b"a", b"b"), (9,), True)


async def test_a_seed_that_is_absent_is_left_to_the_queue(openai: AsyncOpenAI, backend: FakeBackend) -> None:
    await openai.completions.create(model=NAME, prompt="The", n=2)

    assert [seed for _, _, seed, _ in backend.submitted] == [None, None]
    assert len({request.id for request in backend.requests}) == 2


async def test_a_negative_seed_is_the_same_64_bits(openai: AsyncOpenAI, backend: FakeBackend) -> None:
    await openai.completions.create(model=NAME, prompt="The", seed=-1)

    assert backend.submitted[0][2] == 2**64 - 1
