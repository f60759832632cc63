"""POST /v1/chat/completions and /v1/completions: parse, prepare, accept, answer."""

from __future__ import annotations

from dataclasses import dataclass

from litestar import post
from litestar.types import ASGIApp

from api.answers import Answer
from api.dependencies import HttpRequest, OurPayer, OurServices
from api.errors import ApiError
from api.formats import ChatFormat, CompletionFormat, Format
from api.intake import Job, chat_job, completion_job, parse
from api.responses import StreamedAnswer, WholeAnswer
from api.schemas import GenerationRequest
from api.services import CHAT_DECODER, COMPLETION_DECODER, TIMEOUT_HEADER, Services

MAX_TOKENS_HEADER = "x-mtplx-max-tokens"


@post("/v1/chat/completions", status_code=200)
async def create_chat_completion(request: HttpRequest, services: OurServices, payer: OurPayer) -> ASGIApp:
    """Answer a conversation."""
    body = parse(await read_json(request), CHAT_DECODER)
    timeout_ms = services.timeout_ms(request.headers.get(TIMEOUT_HEADER))
    route, bundle = await services.route(body)
    job = await chat_job(body, route, bundle, payer)
    answer = await services.accept(job, route, bundle, endpoint="chat", timeout_ms=timeout_ms)
    style = ChatFormat(job, bundle.text, has_usage=wants_usage(body))
    return respond(services, body, Accepted(job, answer, style))


@post("/v1/completions", status_code=200)
async def create_completion(request: HttpRequest, services: OurServices, payer: OurPayer) -> ASGIApp:
    """Continue a text."""
    body = parse(await read_json(request), COMPLETION_DECODER)
    timeout_ms = services.timeout_ms(request.headers.get(TIMEOUT_HEADER))
    route, bundle = await services.route(body)
    job = await completion_job(body, route, bundle, payer)
    answer = await services.accept(job, route, bundle, endpoint="completions", timeout_ms=timeout_ms)
    style = CompletionFormat(job, bundle.text, has_usage=wants_usage(body))
    return respond(services, body, Accepted(job, answer, style))


@dataclass(frozen=True, slots=True)
class Accepted:
    """A call the queue has taken, and how its answer looks."""

    job: Job
    answer: Answer
    style: Format


def respond(services: Services, body: GenerationRequest, accepted: Accepted) -> ASGIApp:
    """The answer as it was asked for, streamed or whole. From here on the response owns it."""
    job, answer, style = accepted.job, accepted.answer, accepted.style
    headers = {"x-request-id": job.id}
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


def wants_usage(body: GenerationRequest) -> bool:
    """Whether a stream ends with a usage chunk."""
    return bool(body.stream_options and body.stream_options.include_usage)


async def read_json(request: HttpRequest) -> bytes:
    """The raw body.

    Raises:
        ApiError: it is declared to be something other than JSON. A web page of another origin may post plain text
            without asking; refusing it keeps a server on loopback from being used by any page in the browser.
    """
    declared = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if declared != "application/json":
        raise ApiError(f"Content-Type {declared!r}: send application/json.", status=415, kind="invalid_request_error")
    return await request.body()
