"""How an answer looks: OpenAI's chat and text completion objects, whole or as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from api.answers import Delta, End, ShownToken
from api.errors import ApiError
from api.intake import Job
from api.schemas import (
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
from api.text import TokenizerText
from broker.wire import Stats

DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def error_body(error: ApiError) -> bytes:
    """OpenAI's error object."""
    return _encoder.encode(ErrorBody(ErrorDetail(error.message, error.kind, error.param, error.code)))


def error_event(error: ApiError) -> bytes:
    return b"data: " + error_body(error) + b"\n\n"


def comment(text: str) -> bytes:
    """A line that clients ignore and that keeps proxies from hanging up."""
    return f": {text}\n\n".encode()


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

    def __init__(self, job: Job, text: TokenizerText, *, has_usage: bool) -> None:
        self._job = job
        self._text = text
        self._usage_field: None | UnsetType = None if has_usage else UNSET

    def opening(self, index: int) -> bytes:
        return self._chunk(ChatChunkChoice(index, ChatDelta(role="assistant", content="")))

    def delta(self, delta: Delta) -> bytes:
        choice = ChatChunkChoice(delta.choice, ChatDelta(content=delta.text), logprobs=self._logprobs(delta.logprobs))
        return self._chunk(choice)

    def end(self, end: End) -> bytes:
        return self._chunk(ChatChunkChoice(end.choice, ChatDelta(), finish_reason=end.reason))

    def usage(self, usage: Usage) -> bytes:
        job = self._job
        return _event(ChatChunk(job.id, job.created_s, job.model, [], job.fingerprint, usage))

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        job = self._job
        done = [
            ChatChoice(choice.index, AnswerMessage(choice.text), choice.reason, self._logprobs(choice.logprobs))
            for choice in choices
        ]
        return _encoder.encode(Chat(job.id, job.created_s, job.model, done, usage, job.fingerprint))

    def _chunk(self, choice: ChatChunkChoice) -> bytes:
        job = self._job
        return _event(ChatChunk(job.id, job.created_s, job.model, [choice], job.fingerprint, self._usage_field))

    def _logprobs(self, shown: Sequence[ShownToken]) -> ChatLogprobs | None:
        return ChatLogprobs([self._logprob(token) for token in shown]) if self._job.has_logprobs else None

    def _logprob(self, shown: ShownToken) -> ChatLogprob:
        text, data = _named(self._text, shown.token)
        return ChatLogprob(text, shown.logprob, data, [self._top(token, value) for token, value in shown.top])

    def _top(self, token: int, logprob: float) -> TopLogprob:
        text, data = _named(self._text, token)
        return TopLogprob(text, logprob, data)


class CompletionFormat:
    """POST /v1/completions."""

    def __init__(self, job: Job, text: TokenizerText, *, has_usage: bool) -> None:
        self._job = job
        self._text = text
        self._usage_field: None | UnsetType = None if has_usage else UNSET
        self._offsets = dict.fromkeys(range(len(job.works)), 0)

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
        return _encoder.encode(self._object(done, usage))

    def _chunk(self, choice: CompletionChoice) -> bytes:
        return _event(self._object([choice], self._usage_field))

    def _object(self, choices: list[CompletionChoice], usage: Usage | None | UnsetType) -> Completion:
        job = self._job
        return Completion(job.id, job.created_s, job.model, choices, job.fingerprint, usage)

    def _logprobs(self, index: int, part: Delta | WholeChoice) -> CompletionLogprobs | None:
        if not self._job.has_logprobs:
            return None
        names = [_named(self._text, shown.token)[0] for shown in part.logprobs]
        return CompletionLogprobs(
            tokens=names,
            token_logprobs=[shown.logprob for shown in part.logprobs],
            top_logprobs=[self._top(shown) for shown in part.logprobs],
            text_offset=[self._advance(index, len(name)) for name in names],
        )

    def _top(self, shown: ShownToken) -> dict[str, float]:
        return {_named(self._text, token)[0]: value for token, value in shown.top}

    def _advance(self, index: int, size: int) -> int:
        offset = self._offsets[index]
        self._offsets[index] = offset + size
        return offset


def sum_usage(job: Job, ends: Sequence[End]) -> Usage:
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
    return b"data: " + _encoder.encode(value) + b"\n\n"


def _named(text: TokenizerText, token: int) -> tuple[str, list[int]]:
    data = text.token_bytes(token)
    return data.decode("utf-8", "replace"), list(data)
