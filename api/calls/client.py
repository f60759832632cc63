"""Enqueues text straight into Redis: prompts and messages in, OpenAI's answers out, without HTTP in between.

    client = await TextClient.open("redis://localhost")
    call = await client.chat([{"role": "user", "content": "Hello"}], model="smollm2-135m")
    print((await call.wait()).choices[0].message.content)

A program that needs no answer now keeps `call.id` and asks `client.fetch(id)` later, from wherever it likes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from api.calls.call import Endpoint, Reading, TextCall, decode_note, note_of, reading_of
from api.calls.idempotency import said_by
from api.calls.prepare import ApiKeyOwner, ChoiceRequest, Order, chat_job, completion_job, idempotency_of
from api.calls.stream import BackgroundTasks
from api.errors import BadRequestError
from api.fleet.backend import RedisBackend
from api.fleet.catalog import Catalog
from api.openai.parsing import parse
from api.openai.schemas import ChatRequest, CompletionRequest
from api.text.tokenizers import Bundles
from broker.client.client import Client
from broker.client.handle import Handle
from broker.client.notes import read_note, write_note
from broker.errors import UnknownRequestError
from broker.wire import Priority

DAY_S = 24 * 3600.0
NOTE_MARGIN_MS = 7 * 24 * 3600 * 1000
"""As much longer than its deadline as a request's own record is kept."""

_CHAT = msgspec.json.Decoder(ChatRequest)
_COMPLETION = msgspec.json.Decoder(CompletionRequest)


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """On which terms a call is queued."""

    priority: Priority = "offline"
    deadline_s: float = DAY_S
    """It expires when it has not ended by then."""
    keep_s: float = DAY_S
    """How long its answer can be fetched after its end."""
    idempotency_key: str | None = None
    """The caller's name for the call: asked again under it, the same call is read, not run again."""
    call_id: str = ""
    """Its id, where the caller must know it beforehand; the same id and body is accepted once."""
    key_id: str = ""
    """Id of the API key that pays, for fairness between them."""
    is_noted: bool = True
    """Whether it can be fetched by its id alone, see `TextClient.fetch`."""


OFFLINE = QueueOptions()


class TextClient:
    """One per process; closes the broker's client with itself."""

    def __init__(self, client: Client, *, lane_grace_s: float = 60.0) -> None:
        backend = RedisBackend(client)
        self.client = client
        self.catalog = Catalog(backend, age_s=1.0, lane_grace_s=lane_grace_s, stall_s=120.0)
        self._bundles = Bundles(backend.tokenizer_files)
        self._chores = BackgroundTasks()

    @classmethod
    async def open(cls, redis_url: str) -> TextClient:
        """Raises: BrokerUnavailableError."""
        return cls(await Client.open(redis_url))

    async def close(self) -> None:
        """Stop listening; calls in flight run on."""
        await self._chores.finish()
        await self.client.close()

    async def __aenter__(self) -> TextClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], *, model: str, terms: QueueOptions = OFFLINE, **fields: Any
    ) -> TextCall:
        """Queue a conversation; `fields` are those of POST /v1/chat/completions. Raises: as `submit`."""
        body = msgspec.json.encode({"model": model, "messages": messages, **fields})
        return await self.submit("/v1/chat/completions", body, terms)

    async def complete(
        self, prompt: str | Sequence[str] | Sequence[int], *, model: str, terms: QueueOptions = OFFLINE, **fields: Any
    ) -> TextCall:
        """Queue a text to go on with; `fields` are those of POST /v1/completions. Raises: as `submit`."""
        body = msgspec.json.encode({"model": model, "prompt": prompt, **fields})
        return await self.submit("/v1/completions", body, terms)

    async def submit(self, endpoint: Endpoint, body: bytes, terms: QueueOptions = OFFLINE) -> TextCall:
        """Queue the body of an HTTP call.

        Raises:
            ApiError: the body is wrong, or nobody serves the model.
            RefusedError: the queue is full, or id or idempotency key belong to another body.
            BrokerUnavailableError: Redis cannot take it now.
        """
        reading, tokenizer = await self._prepare(endpoint, body, terms)
        said = said_by(_parse(endpoint, body)) if terms.idempotency_key is not None else ""
        handles: list[Handle] = []
        try:
            for index, work in enumerate(reading.job.works):
                handles.append(await self._accept(work, index, terms, said))
            reading = reading.accepted_as([handle.request_id for handle in handles])
            if terms.is_noted:
                await write_note(self.client, reading.job.id, note_of(reading, tokenizer), ttl_ms=_note_ttl_ms(terms))
        except BaseException:
            for handle in handles:
                if terms.call_id or terms.idempotency_key is not None:
                    handle.leave()  # whoever asks again must find it as it was
                else:
                    self._chores.spawn(handle.abandon("client"), name="abandon-request")
            raise
        return TextCall(reading, handles, self._chores)

    async def join(self, endpoint: Endpoint, body: bytes, terms: QueueOptions) -> TextCall:
        """Read the call that has `terms.call_id`, which was submitted with this body or one that means the same.

        Raises: as `submit`.
        """
        reading, _ = await self._prepare(endpoint, body, terms)
        works, has_logprobs = reading.job.works, reading.job.has_logprobs
        handles = [self.client.attach(work.request.id, has_logprobs=has_logprobs) for work in works]
        return TextCall(reading, handles, self._chores)

    async def fetch(self, call_id: str) -> TextCall:
        """A call submitted before, here or elsewhere, from its first token on.

        Raises:
            UnknownRequestError: there is no such call, or its record has expired.
            BrokerUnavailableError: Redis cannot be read now.
        """
        data = await read_note(self.client, call_id)
        if data is None:
            raise UnknownRequestError(f"no call {call_id}, or its record has expired")
        note = decode_note(data)
        reading = reading_of(note, await self._bundles.get(note.tokenizer))
        handles = [self.client.attach(each.id, has_logprobs=note.has_logprobs) for each in note.requests]
        return TextCall(reading, handles, self._chores)

    async def _prepare(self, endpoint: Endpoint, data: bytes, terms: QueueOptions) -> tuple[Reading, str]:
        body = _parse(endpoint, data)
        if body.stream:
            raise BadRequestError(
                "stream has no meaning here; the text can be read as it comes anyway.", param="stream"
            )
        route = await self.catalog.route(body.model, body.numerics_profile)
        bundle = await self._bundles.get(route.card.tokenizer)
        payer, order = ApiKeyOwner(terms.key_id), Order(terms.call_id, terms.priority)
        if isinstance(body, ChatRequest):
            job = await chat_job(body, route, bundle, payer, order=order)
        else:
            job = await completion_job(body, route, bundle, payer, order=order)
        reading = Reading(endpoint, job, bundle, frozenset(route.card.eos_token_ids))
        return reading, route.card.tokenizer

    async def _accept(self, work: ChoiceRequest, index: int, terms: QueueOptions, said: str) -> Handle:
        return await self.client.submit(
            work.request,
            work.ticket,
            seed=work.seed,
            timeout_ms=_ms(terms.deadline_s),
            retain_ms=_ms(terms.keep_s),
            idempotency=idempotency_of(terms.idempotency_key, index, said=said, keep_s=terms.deadline_s + terms.keep_s),
        )


def _parse(endpoint: Endpoint, data: bytes) -> ChatRequest | CompletionRequest:
    """Raises: BadRequestError."""
    return parse(data, _CHAT) if endpoint == "/v1/chat/completions" else parse(data, _COMPLETION)


def _note_ttl_ms(terms: QueueOptions) -> int:
    return _ms(terms.deadline_s) + _ms(terms.keep_s) + NOTE_MARGIN_MS


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))
