"""From a request body to what the queue takes: checked, rendered, tokenised, bounded. Submits nothing."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from api.errors import BadRequestError, ContextLengthError
from api.fleet.catalog import Route, default_sampling
from api.openai.parsing import check_chat, check_completion
from api.openai.schemas import ChatRequest, CompletionRequest, GenerationRequest
from api.text.conversation import LONG_TEXT, encode, render
from api.text.tokenizers import Bundle
from broker.scripts import Idempotency, Quota
from broker.wire import Priority, Request, Sampling, Ticket, new_id, pack_tokens

MAX_CHOICES = 128


@dataclass(frozen=True, slots=True)
class ApiKeyOwner:
    """Who asks, and what they may have."""

    key_id: str = ""
    """Empty when keys are off."""
    quota: Quota = Quota()


@dataclass(frozen=True, slots=True)
class Order:
    """How a call enters the queue, where that is not the body's to say."""

    id: str = ""
    """Id of the call, where it must be the same when asked again; empty: a fresh one."""
    priority: Priority = "interactive"


USUAL = Order()


@dataclass(frozen=True, slots=True)
class ChoiceRequest:
    """One choice of an answer: one request of the queue."""

    request: Request
    ticket: Ticket
    seed: int | None


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """One HTTP call, ready to be submitted."""

    id: str
    created_s: int
    model: str
    fingerprint: str
    works: Sequence[ChoiceRequest]
    prompt_tokens: int
    """Tokens of all prompts, each counted once."""
    clamped_max_tokens: int | None
    """What `max_tokens` was lowered to; None when it was not."""
    has_logprobs: bool

    @property
    def tickets(self) -> list[Ticket]:
        return [work.ticket for work in self.works]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What every choice of a call shares."""

    id: str
    body: GenerationRequest
    route: Route
    payer: ApiKeyOwner
    order: Order
    max_tokens: int | None
    top_logprobs: int | None


async def chat_job(
    body: ChatRequest, route: Route, bundle: Bundle, payer: ApiKeyOwner, *, order: Order = USUAL
) -> PreparedCall:
    """Raises: BadRequestError."""
    check_chat(body)
    prompt = await render(body, bundle)
    _check_size(prompt.text, route, bundle, param="messages")
    tokens = await encode(prompt, bundle.text)
    limits = [limit for limit in (body.max_completion_tokens, body.max_tokens) if limit is not None]
    plan = _Plan(
        id=order.id or new_id("chatcmpl"),
        body=body,
        route=route,
        payer=payer,
        order=order,
        max_tokens=limits[0] if limits else None,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return _job(plan, [tokens], param="messages")


async def completion_job(
    body: CompletionRequest, route: Route, bundle: Bundle, payer: ApiKeyOwner, *, order: Order = USUAL
) -> PreparedCall:
    """Raises: BadRequestError."""
    check_completion(body)
    prompts = _prompts(body)
    if len(prompts) * (body.n or 1) > MAX_CHOICES:
        raise BadRequestError(f"At most {MAX_CHOICES} choices (prompts times n) in one call.", param="prompt")
    for prompt in prompts:
        if isinstance(prompt, str):
            _check_size(prompt, route, bundle, param="prompt")
    plan = _Plan(
        id=order.id or new_id("cmpl"),
        body=body,
        route=route,
        payer=payer,
        order=order,
        max_tokens=body.max_tokens,
        top_logprobs=body.logprobs,
    )
    return _job(plan, await _encode_all(bundle, prompts), param="prompt")


def sub_seed(seed: int | None, index: int) -> int | None:
    """The seed of one of n choices: the first keeps the caller's, the others' follow from it."""
    if seed is None:
        return None
    unsigned = seed % 2**64
    if index == 0:
        return unsigned
    return int.from_bytes(hashlib.sha256(f"{unsigned}:{index}".encode()).digest()[:8], "big")


def idempotency_of(key: str | None, index: int, *, said: str, keep_s: float) -> Idempotency | None:
    """The name of one of a call's requests, from the caller's name for the call; `said` as of `idempotency.said_by`."""
    if key is None:
        return None
    return Idempotency(hashlib.sha256(f"{index}:{key}".encode()).hexdigest(), int(keep_s * 1000), said)


def _job(plan: _Plan, prompts: Sequence[Sequence[int]], *, param: str) -> PreparedCall:
    limits = [_room(plan, prompt, param=param) for prompt in prompts]
    _check_min_tokens(plan.body, most=min(limits))
    clamped = min(limits) if plan.max_tokens is not None and min(limits) < plan.max_tokens else None
    sampling = _sampling(plan)
    copies = plan.body.n or 1
    works = [
        _work(plan, prompt, sampling, max_tokens=limit, index=place * copies + copy)
        for place, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        for copy in range(copies)
    ]
    return PreparedCall(
        id=plan.id,
        created_s=int(time.time()),
        model=plan.body.model,
        fingerprint=plan.route.card.model,
        works=works,
        prompt_tokens=sum(map(len, prompts)),
        clamped_max_tokens=clamped,
        has_logprobs=plan.top_logprobs is not None,
    )


def _work(plan: _Plan, prompt: Sequence[int], sampling: Sampling, *, max_tokens: int, index: int) -> ChoiceRequest:
    body, card = plan.body, plan.route.card
    request = Request(
        id=plan.id if index == 0 else f"{plan.id}-{index}",
        model=card.model,
        profile=plan.route.profile,
        prompt=pack_tokens(prompt),
        max_tokens=max_tokens,
        sampling=sampling,
        stop=stop_strings(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        top_logprobs=plan.top_logprobs,
        min_tokens=body.min_tokens or 0,
    )
    ticket = Ticket(
        id=request.id,
        model=card.model,
        profile=request.profile,
        prompt_tokens=len(prompt),
        max_tokens=max_tokens,
        priority=plan.order.priority,
        key_id=plan.payer.key_id,
    )
    return ChoiceRequest(request, ticket, sub_seed(body.seed, index))


def stop_strings(stop: str | list[str] | None) -> tuple[bytes, ...]:
    """Stop strings as bytes."""
    strings = [stop] if isinstance(stop, str) else stop or []
    return tuple(string.encode() for string in strings)


def _room(plan: _Plan, prompt: Sequence[int], *, param: str) -> int:
    """Tokens this prompt's completion may have."""
    if not prompt:
        raise BadRequestError("The prompt has no tokens.", param=param)
    vocab_size = plan.route.card.vocab_size
    if max(prompt) >= vocab_size:
        raise BadRequestError(f"Token ids must be below {vocab_size}.", param=param)
    limit = plan.route.max_context_tokens
    room = limit - len(prompt)
    if room < 1:
        raise ContextLengthError(tokens=len(prompt), limit=limit, param=param)
    wanted = plan.max_tokens if plan.max_tokens is not None else default_sampling(plan.route.card).max_tokens
    return room if wanted is None else min(wanted, room)


def _check_min_tokens(body: GenerationRequest, *, most: int) -> None:
    if (body.min_tokens or 0) > most:
        message = f"min_tokens is {body.min_tokens}, and the completion can have {most} tokens at most."
        raise BadRequestError(message, param="min_tokens")


def _sampling(plan: _Plan) -> Sampling:
    body, vocab_size = plan.body, plan.route.card.vocab_size
    default = default_sampling(plan.route.card)
    for token in body.stop_token_ids or ():
        if token >= vocab_size:
            raise BadRequestError(f"Token ids must be below {vocab_size}.", param="stop_token_ids")
    return Sampling(
        temperature=_or(body.temperature, default.temperature),
        top_p=_or(body.top_p, default.top_p),
        top_k=max(0, default.top_k if body.top_k is None else body.top_k),
        min_p=_or(body.min_p, default.min_p),
        repetition_penalty=_or(body.repetition_penalty, default.repetition_penalty),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _logit_bias(bias: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = {}
    for name, value in bias.items():
        # No sign, no blanks, no other scripts' digits: what int() also reads is no token id here.
        if not (name.isascii() and name.isdigit() and len(name) < 10 and int(name) < vocab_size):
            raise BadRequestError(f"logit_bias names token ids from 0 to {vocab_size - 1}.", param="logit_bias")
        pairs[int(name)] = float(value)
    return tuple(sorted(pairs.items()))


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    if isinstance(body.prompt, str):
        return [body.prompt]
    prompts: list[str | list[int]] = []
    numbers: list[int] = []
    for item in body.prompt:
        if isinstance(item, int):
            numbers.append(item)
        else:
            prompts.append(item)
    if numbers and prompts:
        raise BadRequestError("prompt mixes token ids with whole prompts.", param="prompt")
    if not numbers and not prompts:
        raise BadRequestError("prompt is empty.", param="prompt")
    return [numbers] if numbers else prompts


def _check_size(text: str, route: Route, bundle: Bundle, *, param: str) -> None:
    """Refuse before it is tokenised what is too long however few tokens it has. Raises: ContextLengthError."""
    widest = bundle.text.bytes_per_token
    least = 0 if widest is None else math.ceil(len(text.encode()) / widest)
    if least >= route.max_context_tokens:
        raise ContextLengthError(tokens=least, limit=route.max_context_tokens, param=param, is_least=True)


async def _encode_all(bundle: Bundle, prompts: Sequence[str | list[int]]) -> list[list[int]]:
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str):
            prompt = await _encode(bundle, prompt)
            await asyncio.sleep(0)  # many short texts hold up the event loop like a long one
        encoded.append(prompt)
    return encoded


async def _encode(bundle: Bundle, text: str) -> list[int]:
    if len(text) < LONG_TEXT:
        return bundle.text.encode(text, add_special_tokens=True)
    return await asyncio.to_thread(bundle.text.encode_aside, text, add_special_tokens=True)
