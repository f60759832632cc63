"""How an answer looks: OpenAI's chat and text completion objects, whole or as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Protocol

from msgspec import UNSET, UnsetType

from api.calls.prepare import PreparedCall
from api.calls.stream import Delta, End, ShownToken
from api.errors import ApiError
from api.openai.schemas import (
    AnswerMessage,
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    EngineUsage,
    ErrorBody,
    ErrorDetail,
    TopLogprob,
    Usage,
    UsageDetails,
)
from api.text.detokenizer import TokenizerText
from api.text.json_text import encode_json
from api.text.token_names import TokenName, TokenNames
from broker.wire import Stats

DONE = b"data: [DONE]\n\n"


def error_body(error: ApiError) -> bytes:
    """OpenAI's error object."""
    return encode_json(ErrorBody(ErrorDetail(error.message, error.kind, error.param, error.code)))


def error_event(error: ApiError) -> bytes:
    return b"data: " + error_body(error) + b"\n\n"


def comment(text: str) -> bytes:
    """A line that clients ignore and that keeps proxies from hanging up.

    No blank line follows: some clients take a block without data for an event without any, and end there.
    """
    return f": {text}\n".encode()


class Format(Protocol):
    """One endpoint's way to write an answer."""

    def opening(self, index: int) -> bytes:
        """What is sent before a choice has any text."""

    def delta(self, delta: Delta) -> bytes: ...

    def end(self, end: End) -> bytes: ...

    def usage(self, usage: Usage) -> bytes: ...

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes: ...


@dataclass(slots=True)
class WholeChoice:
    """One choice as it grows."""

    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[ShownToken] = field(default_factory=list)
    end: End | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reason(self) -> str:
        assert self.end is not None
        return self.end.reason

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.logprobs += delta.logprobs


class ChatFormat:
    """POST /v1/chat/completions."""

    def __init__(self, job: PreparedCall, text: TokenizerText, *, has_usage: bool) -> None:
        self._job = job
        self._usage_field: None | UnsetType = None if has_usage else UNSET
        self._names = [TokenNames(text) for _ in job.works]

    def opening(self, index: int) -> bytes:
        return self._chunk(ChatChunkChoice(index, ChatDelta(role="assistant", content="")))

    def delta(self, delta: Delta) -> bytes:
        logprobs = self._logprobs(delta.choice, delta.logprobs)
        return self._chunk(ChatChunkChoice(delta.choice, ChatDelta(content=delta.text), logprobs=logprobs))

    def end(self, end: End) -> bytes:
        return self._chunk(ChatChunkChoice(end.choice, ChatDelta(), finish_reason=end.reason))

    def usage(self, usage: Usage) -> bytes:
        job = self._job
        return _event(ChatChunk(job.id, job.created_s, job.model, [], job.fingerprint, usage))

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        job = self._job
        done = [
            ChatChoice(
                choice.index,
                AnswerMessage(choice.text),
                choice.reason,
                self._logprobs(choice.index, choice.logprobs),
            )
            for choice in choices
        ]
        return encode_json(Chat(job.id, job.created_s, job.model, done, usage, job.fingerprint))

    def _chunk(self, choice: ChatChunkChoice) -> bytes:
        job = self._job
        return _event(ChatChunk(job.id, job.created_s, job.model, [choice], job.fingerprint, self._usage_field))

    def _logprobs(self, index: int, shown: Sequence[ShownToken]) -> ChatLogprobs | None:
        if not self._job.has_logprobs:
            return None
        return ChatLogprobs([_chat_logprob(token, *self._names[index].name(token)) for token in shown])


class CompletionFormat:
    """POST /v1/completions."""

    def __init__(self, job: PreparedCall, text: TokenizerText, *, has_usage: bool) -> None:
        self._job = job
        self._usage_field: None | UnsetType = None if has_usage else UNSET
        self._names = [TokenNames(text) for _ in job.works]

    def opening(self, index: int) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        return self._chunk(CompletionChoice(delta.choice, delta.text, logprobs=self._logprobs(delta.choice, delta)))

    def end(self, end: End) -> bytes:
        return self._chunk(CompletionChoice(end.choice, "", finish_reason=end.reason))

    def usage(self, usage: Usage) -> bytes:
        return _event(self._object([], usage))

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        done = [
            CompletionChoice(choice.index, choice.text, choice.reason, self._logprobs(choice.index, choice))
            for choice in choices
        ]
        return encode_json(self._object(done, usage))

    def _chunk(self, choice: CompletionChoice) -> bytes:
        return _event(self._object([choice], self._usage_field))

    def _object(self, choices: list[CompletionChoice], usage: Usage | None | UnsetType) -> Completion:
        job = self._job
        return Completion(job.id, job.created_s, job.model, choices, job.fingerprint, usage)

    def _logprobs(self, index: int, part: Delta | WholeChoice) -> CompletionLogprobs | None:
        if not self._job.has_logprobs:
            return None
        named = [(shown, *self._names[index].name(shown)) for shown in part.logprobs]
        return CompletionLogprobs(
            tokens=[name.text for _, name, _ in named],
            token_logprobs=[shown.logprob for shown, _, _ in named],
            top_logprobs=[_completion_top(shown, name, others) for shown, name, others in named],
            text_offset=[name.offset for _, name, _ in named],
            bytes=[name.data for _, name, _ in named],
        )


def sum_usage(job: PreparedCall, ends: Sequence[End]) -> Usage:
    """Usage of a whole call; each prompt counts once, every completion in full."""
    completion = sum(end.completion_tokens for end in ends)
    engine = _engine_usage([end.stats for end in ends])
    drafted, accepted = sum(engine.drafted), sum(engine.accepted)
    return Usage(
        prompt_tokens=job.prompt_tokens,
        completion_tokens=completion,
        total_tokens=job.prompt_tokens + completion,
        completion_tokens_details=UsageDetails(accepted, drafted - accepted) if drafted else UNSET,
        mtplx=engine if drafted else UNSET,
    )


def _engine_usage(stats: Sequence[Stats]) -> EngineUsage:
    return EngineUsage(
        cycles=sum(each.cycles for each in stats),
        drafted=[sum(by_depth) for by_depth in zip_longest(*(each.drafted for each in stats), fillvalue=0)],
        accepted=[sum(by_depth) for by_depth in zip_longest(*(each.accepted for each in stats), fillvalue=0)],
        min_width=min((each.min_width for each in stats), default=0),
        max_width=max((each.max_width for each in stats), default=0),
    )


def _event(value: ChatChunk | Completion) -> bytes:
    return b"data: " + encode_json(value) + b"\n\n"


def _chat_logprob(shown: ShownToken, name: TokenName, others: Sequence[TokenName]) -> ChatLogprob:
    top = [TopLogprob(other.text, logprob, other.data) for other, (_, logprob) in zip(others, shown.top, strict=True)]
    return ChatLogprob(name.text, shown.logprob, name.data, top)


def _completion_top(shown: ShownToken, name: TokenName, others: Sequence[TokenName]) -> dict[str, float]:
    """Logprobs by name. Of several of one name the token itself counts, and else the likeliest."""
    top: dict[str, float] = {}
    for other, (_, logprob) in zip(others, shown.top, strict=True):
        top.setdefault(other.text, logprob)
    if any(token == shown.token for token, _ in shown.top):
        top[name.text] = shown.logprob
    return top
