"""What one body may cost the process that takes it in, however large it is. Engine: none."""

from __future__ import annotations

import asyncio
import datetime
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from api.calls.prepare import MAX_CHOICES, ApiKeyOwner, chat_job, completion_job
from api.errors import BadRequestError, ContextLengthError
from api.fleet.catalog import Route
from api.openai.schemas import ChatRequest, CompletionRequest, Message, TextPart
from api.text.chat_template import ChatTemplate
from api.text.conversation import LONG_CONVERSATION, LONG_TEXT
from api.text.detokenizer import TokenizerText
from api.text.tokenizers import Bundle
from harness.wait import PATIENCE_S
from tests.api.fake import CONTEXT, NAME, TEMPLATE, card, tokenizer_files

LONGEST_TOKEN = "<|endoftext|>"


class Turns:
    """Counts how often another task of the loop had its turn."""

    def __init__(self) -> None:
        self.count = 0

    @asynccontextmanager
    async def counting(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._count())
        try:
            yield
        finally:
            task.cancel()

    async def _count(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)


class WatchedText(TokenizerText):
    """A tokenizer that notes for each text how many turns others had had before and after."""

    def __init__(self) -> None:
        super().__init__(tokenizer_files()["tokenizer.json"])
        self.turns = Turns()
        self.seen: list[tuple[int, int]] = []

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        before = self.turns.count
        tokens = super().encode(text, add_special_tokens=add_special_tokens)
        self.seen.append((before, self.turns.count))
        return tokens

    def encode_aside(self, text: str, *, add_special_tokens: bool) -> list[int]:
        before = self.turns.count
        tokens = super().encode_aside(text, add_special_tokens=add_special_tokens)
        self.seen.append((before, self.turns.count))
        return tokens


@pytest.fixture
def text() -> WatchedText:
    return WatchedText()


@pytest.fixture
def threads_switch_only_when_they_wait() -> Iterator[None]:
    """A thread that does not release the interpreter by itself keeps it."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(interval_s)


def route(max_context_tokens: int = CONTEXT) -> Route:
    return Route(card(), "balanced", max_context_tokens)


def completion(prompt: str | list[str | int | list[int]], *, n: int | None = None) -> CompletionRequest:
    return CompletionRequest(model=NAME, prompt=prompt, n=n)


@pytest.mark.parametrize(
    ("prompts", "n"), [(MAX_CHOICES + 1, None), (MAX_CHOICES // 2 + 1, 2)], ids=["prompts", "prompts times n"]
)
async def test_too_many_choices_are_refused_before_any_text_is_tokenised(
    text: WatchedText, prompts: int, n: int | None
) -> None:
    with pytest.raises(BadRequestError, match="choices"):
        await completion_job(completion(["a"] * prompts, n=n), route(), Bundle(text, None), ApiKeyOwner())

    assert text.seen == []


async def test_other_tasks_have_their_turns_between_many_prompts(text: WatchedText) -> None:
    async with text.turns.counting():
        await completion_job(completion(["a"] * 10), route(), Bundle(text, None), ApiKeyOwner())

    before = [turn for turn, _ in text.seen]
    assert len(before) == 10
    assert before == sorted(set(before))


@pytest.mark.usefixtures("threads_switch_only_when_they_wait")
async def test_other_tasks_have_their_turns_while_a_long_text_is_tokenised(text: WatchedText) -> None:
    long_text = "The quick brown fox. " * LONG_TEXT

    async with text.turns.counting():
        await completion_job(completion(long_text), route(len(long_text)), Bundle(text, None), ApiKeyOwner())

    ((before, after),) = text.seen
    assert after > before


@pytest.mark.parametrize("prompt", ["The quick", "a" * LONG_TEXT, "Füchse 漢字 😀 <|im_end|> " * LONG_TEXT])
@pytest.mark.parametrize("has_special", [True, False])
def test_text_has_the_same_tokens_wherever_it_is_tokenised(prompt: str, has_special: bool) -> None:
    under_test = TokenizerText(tokenizer_files()["tokenizer.json"])

    aside = under_test.encode_aside(prompt, add_special_tokens=has_special)

    assert aside == under_test.encode(prompt, add_special_tokens=has_special)


@pytest.mark.parametrize("prompts", [[], ["a"]], ids=["alone", "behind one that fits"])
async def test_a_prompt_too_long_whatever_its_tokens_are_is_refused_before_any_is_tokenised(
    text: WatchedText, prompts: list[str | int | list[int]]
) -> None:
    too_long = LONGEST_TOKEN * CONTEXT

    with pytest.raises(ContextLengthError, match=rf"prompt has at least {CONTEXT} tokens") as caught:
        await completion_job(completion([*prompts, too_long]), route(), Bundle(text, None), ApiKeyOwner())

    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert text.seen == []


async def test_a_conversation_too_long_whatever_its_tokens_are_is_refused_before_it_is_tokenised(
    text: WatchedText,
) -> None:
    body = ChatRequest(model=NAME, messages=[Message("user", LONGEST_TOKEN * CONTEXT)])

    with pytest.raises(ContextLengthError, match="messages has at least"):
        await chat_job(
            body, route(), Bundle(text, ChatTemplate(TEMPLATE, {}, clock=datetime.datetime.now)), ApiKeyOwner()
        )

    assert text.seen == []


async def test_the_longest_prompt_that_fits_is_taken(text: WatchedText) -> None:
    prompt = LONGEST_TOKEN * (CONTEXT - 1)

    job = await completion_job(completion(prompt), route(), Bundle(text, None), ApiKeyOwner())

    assert job.prompt_tokens == CONTEXT - 1


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([Message("user", "a")] * LONG_CONVERSATION, id="many messages"),
        pytest.param([Message("user", "a" * LONG_TEXT)], id="a long message"),
        pytest.param([Message("user", [TextPart("text", "")] * LONG_TEXT)], id="many parts"),
        pytest.param([Message("assistant", reasoning_content="a" * LONG_TEXT)], id="long thoughts"),
    ],
)
async def test_other_tasks_have_their_turns_while_a_long_conversation_is_rendered(
    text: WatchedText, messages: list[Message]
) -> None:
    had_turn = threading.Event()
    seen = []

    def clock() -> datetime.datetime:
        seen.append(had_turn.wait(PATIENCE_S))
        return datetime.datetime(2026, 1, 2)

    template = ChatTemplate("{{ strftime_now('%Y') }}", {}, clock=clock)
    asyncio.get_running_loop().call_soon(had_turn.set)

    job = await chat_job(ChatRequest(model=NAME, messages=messages), route(), Bundle(text, template), ApiKeyOwner())

    assert seen == [True]
    assert job.prompt_tokens == len(text.encode("2026", add_special_tokens=False))


async def test_a_short_conversation_is_rendered_where_it_is(text: WatchedText) -> None:
    threads = []

    def clock() -> datetime.datetime:
        threads.append(threading.current_thread())
        return datetime.datetime(2026, 1, 2)

    template = ChatTemplate("{{ strftime_now('%Y') }}", {}, clock=clock)
    body = ChatRequest(model=NAME, messages=[Message("user", "a")] * (LONG_CONVERSATION - 1))

    await chat_job(body, route(), Bundle(text, template), ApiKeyOwner())

    assert threads == [threading.current_thread()]


async def test_a_long_conversation_that_the_template_refuses_is_a_bad_request(text: WatchedText) -> None:
    template = ChatTemplate("{{ raise_exception('too many') }}", {}, clock=datetime.datetime.now)
    body = ChatRequest(model=NAME, messages=[Message("user", "a")] * LONG_CONVERSATION)

    with pytest.raises(BadRequestError, match="too many"):
        await chat_job(body, route(), Bundle(text, template), ApiKeyOwner())
