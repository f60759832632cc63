"""A call on the queue as its submitter reads it: text as it comes, or the whole answer. Knows no HTTP.

Also the note from which another program, later, reads the same call.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import msgspec
from msgspec import structs

from api.calls.collect import collect
from api.calls.prepare import ChoiceRequest, PreparedCall
from api.calls.stream import Answer, BackgroundTasks, CallFault, Choice, Delta
from api.openai.formats import ChatFormat, CompletionFormat, Format, sum_usage
from api.openai.schemas import Chat, Completion, Usage
from api.text.detokenizer import TextRules
from api.text.tokenizers import Bundle
from broker.client.handle import Handle
from broker.errors import WireError
from broker.wire import Cause, Request, Ticket

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]


class Whole(NamedTuple):
    """A call's answer."""

    body: bytes
    """OpenAI's object as JSON."""
    usage: Usage
    reasons: Sequence[str]
    """Why each choice ended."""


class TextDelta(NamedTuple):
    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class Reading:
    """What it takes to read a call's tokens as text."""

    endpoint: Endpoint
    job: PreparedCall
    bundle: Bundle
    eos_token_ids: frozenset[int]

    def accepted_as(self, request_ids: Sequence[str]) -> Reading:
        """The same call under the ids of its requests that the queue knows."""
        named = zip(self.job.works, request_ids, strict=True)
        works = [replace(work, request=structs.replace(work.request, id=request_id)) for work, request_id in named]
        return replace(self, job=replace(self.job, id=request_ids[0], works=works))

    @property
    def style(self) -> Format:
        kind = ChatFormat if self.endpoint == "/v1/chat/completions" else CompletionFormat
        return kind(self.job, self.bundle.text, has_usage=False)

    def choice(self, index: int, handle: Handle) -> Choice:
        request = self.job.works[index].request
        rules = TextRules(
            stops=request.stop,
            hidden=frozenset() if request.ignore_eos else self.eos_token_ids,
            tracks_tokens=self.job.has_logprobs,
            min_tokens=request.min_tokens,
        )
        return Choice(index, handle, self.bundle.text.stream(rules), has_logprobs=self.job.has_logprobs)


class TextCall:
    """One call, for one reader: read it once, as a stream or whole. Leaving it unread leaves it running."""

    def __init__(self, reading: Reading, handles: Sequence[Handle], chores: BackgroundTasks) -> None:
        self._reading = reading
        self._handles = handles
        self._chores = chores

    @property
    def id(self) -> str:
        return self._reading.job.id

    @property
    def job(self) -> PreparedCall:
        return self._reading.job

    async def whole(self) -> Whole:
        """The answer, once everything has ended.

        Raises:
            ApiError: it failed.
        """
        job = self._reading.job
        with self._reading_answer() as answer:
            choices = await collect(answer, len(job.works))
        usage = sum_usage(job, [choice.end for choice in choices if choice.end is not None])
        return Whole(self._reading.style.whole(choices, usage), usage, [choice.reason for choice in choices])

    async def wait(self) -> Chat | Completion:
        """The answer as OpenAI's object. Raises: ApiError."""
        body = (await self.whole()).body
        if self._reading.endpoint == "/v1/chat/completions":
            return msgspec.json.decode(body, type=Chat)
        return msgspec.json.decode(body, type=Completion)

    async def stream(self) -> AsyncIterator[TextDelta]:
        """The text as it comes. Raises: ApiError."""
        with self._reading_answer() as answer:
            while not answer.is_over:
                for item in await answer.next_items():
                    match item:
                        case Delta() if item.text:
                            yield TextDelta(item.choice, item.text)
                        case CallFault(error):
                            raise error

    async def cancel(self, cause: Cause = "client") -> None:
        """Ask for the end of all its requests, wherever they are."""
        for handle in self._handles:
            await handle.abandon(cause)

    @contextlib.contextmanager
    def _reading_answer(self) -> Iterator[Answer]:
        choices = [self._reading.choice(index, handle) for index, handle in enumerate(self._handles)]
        answer = Answer(choices, self._chores, _NoMeter())
        try:
            yield answer
        finally:
            answer.leave()
            for handle in self._handles:
                handle.leave()


class _NoMeter:
    """Programs count for themselves."""

    def tokens(self, index: int, count: int) -> None: ...

    def ended(self, how: str) -> None: ...


class Note(msgspec.Struct, frozen=True, array_like=True):
    """A call as written down beside its requests; prompts are left out, they are long and not needed."""

    endpoint: Endpoint
    id: str
    created_s: int
    model: str
    fingerprint: str
    prompt_tokens: int
    has_logprobs: bool
    tokenizer: str
    eos_token_ids: tuple[int, ...]
    requests: tuple[Request, ...]


_decoder = msgspec.msgpack.Decoder(Note)


def note_of(reading: Reading, tokenizer: str) -> bytes:
    """What must be known to read this call's answer."""
    job = reading.job
    requests = tuple(structs.replace(work.request, prompt=b"") for work in job.works)
    note = Note(
        endpoint=reading.endpoint,
        id=job.id,
        created_s=job.created_s,
        model=job.model,
        fingerprint=job.fingerprint,
        prompt_tokens=job.prompt_tokens,
        has_logprobs=job.has_logprobs,
        tokenizer=tokenizer,
        eos_token_ids=tuple(reading.eos_token_ids),
        requests=requests,
    )
    return msgspec.msgpack.encode(note)


def decode_note(data: bytes) -> Note:
    """Raises: WireError."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise WireError(f"a call's note cannot be read: {error}") from error


def reading_of(note: Note, bundle: Bundle) -> Reading:
    """The call behind a note."""
    works = [ChoiceRequest(request, _ticket(request), None) for request in note.requests]
    job = PreparedCall(
        id=note.id,
        created_s=note.created_s,
        model=note.model,
        fingerprint=note.fingerprint,
        works=works,
        prompt_tokens=note.prompt_tokens,
        clamped_max_tokens=None,
        has_logprobs=note.has_logprobs,
    )
    return Reading(note.endpoint, job, bundle, frozenset(note.eos_token_ids))


def _ticket(request: Request) -> Ticket:
    return Ticket(request.id, request.model, request.profile, 0, request.max_tokens, "offline")
