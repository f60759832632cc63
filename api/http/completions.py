"""POST /v1/chat/completions and /v1/completions: parse, prepare, accept, answer."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from litestar import post
from litestar.types import ASGIApp

from api.calls.idempotency import HEADER, idempotency_key, said_by
from api.calls.prepare import ApiKeyOwner, PreparedCall, chat_job, completion_job
from api.calls.stream import Answer
from api.errors import ApiError
from api.http.bodies import read_json
from api.http.dependencies import HttpRequest, OurPayer, OurServices
from api.http.services import CHAT_DECODER, COMPLETION_DECODER, TIMEOUT_HEADER, ResolvedModel, Services, SubmitOptions
from api.http.sse import StreamedAnswer, WholeAnswer
from api.openai.formats import ChatFormat, CompletionFormat, Format
from api.openai.parsing import parse
from api.openai.schemas import GenerationRequest
from broker.errors import ConflictError
from broker.scripts import Accepted, Quota

MAX_TOKENS_HEADER = "x-mtplx-max-tokens"


@post("/v1/chat/completions", status_code=200)
async def create_chat_completion(request: HttpRequest, services: OurServices, payer: OurPayer) -> ASGIApp:
    """Answer a conversation."""
    body = parse(await read_json(request), CHAT_DECODER)
    terms = terms_of(request, services, payer, body, endpoint="chat")
    way, job, answer = await take(services, body, terms, lambda way: chat_job(body, way.route, way.bundle, payer))
    style = ChatFormat(job, way.bundle.text, has_usage=wants_usage(body))
    return respond(services, body, AcceptedCall(job, payer, answer, style))


@post("/v1/completions", status_code=200)
async def create_completion(request: HttpRequest, services: OurServices, payer: OurPayer) -> ASGIApp:
    """Continue a text."""
    body = parse(await read_json(request), COMPLETION_DECODER)
    terms = terms_of(request, services, payer, body, endpoint="completions")
    way, job, answer = await take(services, body, terms, lambda way: completion_job(body, way.route, way.bundle, payer))
    style = CompletionFormat(job, way.bundle.text, has_usage=wants_usage(body))
    return respond(services, body, AcceptedCall(job, payer, answer, style))


def terms_of(
    request: HttpRequest, services: Services, payer: ApiKeyOwner, body: GenerationRequest, *, endpoint: str
) -> SubmitOptions:
    """What the headers ask for. Raises: BadRequestError."""
    timeout_ms = services.timeout_ms(request.headers.get(TIMEOUT_HEADER))
    key = idempotency_key(request.headers.get(HEADER))
    return SubmitOptions(payer, endpoint, timeout_ms, key, said_by(body) if key is not None else "")


class Taken(NamedTuple):
    """What the queue has taken, or had taken before."""

    way: ResolvedModel
    job: PreparedCall
    answer: Answer


async def take(
    services: Services,
    body: GenerationRequest,
    terms: SubmitOptions,
    prepare: Callable[[ResolvedModel], Awaitable[PreparedCall]],
) -> Taken:
    """Submit a call, or find the one that its idempotency key names. Raises: ApiError, BrokerError."""
    way = await services.way(body)
    try:
        return await _take(services, way, terms, prepare)
    except ConflictError:
        # When this was asked first, the model's name may have stood for another identity.
        for route in services.catalog.namesakes(way.route.card):
            with contextlib.suppress(ApiError, ConflictError):
                bundle = await services.bundles.get(route.card.tokenizer)
                return await _take(services, ResolvedModel(route, bundle), terms, prepare)
        raise


async def _take(
    services: Services,
    way: ResolvedModel,
    terms: SubmitOptions,
    prepare: Callable[[ResolvedModel], Awaitable[PreparedCall]],
) -> Taken:
    job = await prepare(way)
    answer = await services.accept(job, way, terms)
    return Taken(way, replace(job, id=answer.call_id), answer)


@dataclass(frozen=True, slots=True)
class AcceptedCall:
    """A call the queue has taken, and how its answer looks."""

    job: PreparedCall
    payer: ApiKeyOwner
    answer: Answer
    style: Format


def respond(services: Services, body: GenerationRequest, accepted: AcceptedCall) -> ASGIApp:
    """The answer as it was asked for, streamed or whole. From here on the response owns it."""
    job, answer, style = accepted.job, accepted.answer, accepted.style
    headers = {"x-request-id": job.id, **quota_headers(accepted.payer.quota, answer.accepted)}
    if job.clamped_max_tokens is not None:
        headers[MAX_TOKENS_HEADER] = str(job.clamped_max_tokens)
    if not body.stream:
        return WholeAnswer(answer, style, job, headers=headers)
    return StreamedAnswer(
        answer,
        style,
        job,
        headers=headers,
        keep_alive_s=services.config.keep_alive_s,
        has_usage=wants_usage(body),
    )


def quota_headers(quota: Quota, accepted: Accepted) -> dict[str, str]:
    """OpenAI's headers about what a key may still have."""
    headers = {}
    for name, limit, left in (
        ("requests", quota.requests_per_minute, accepted.requests_left),
        ("tokens", quota.tokens_per_minute, accepted.tokens_left),
    ):
        if limit and left is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, left))
            headers[f"x-ratelimit-reset-{name}"] = f"{60 * (1 - max(0, left) / limit):.3f}s"
    return headers


def wants_usage(body: GenerationRequest) -> bool:
    """Whether a stream ends with a usage chunk."""
    return bool(body.stream_options and body.stream_options.include_usage)
