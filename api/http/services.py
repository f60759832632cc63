"""Everything the handlers of one process share, and the one way from a body to an accepted answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from api.auth import KeyRing
from api.batch.access import Offline
from api.calls.idempotency import Detached
from api.calls.prepare import ApiKeyOwner, PreparedCall, idempotency_of
from api.calls.quota import check_fits, check_rest, whole_wait_s
from api.calls.stream import Answer, BackgroundTasks, Choice
from api.config import ApiConfig, is_loopback
from api.errors import ApiError, BadRequestError, BusyError
from api.fleet.backend import Backend, RequestHandle
from api.fleet.catalog import Catalog, Route
from api.fleet.metrics import Metrics
from api.http.callers import names_this_machine
from api.openai.schemas import ChatRequest, CompletionRequest, GenerationRequest
from api.text.detokenizer import TextRules
from api.text.tokenizers import Bundle, Bundles
from broker.errors import BrokerUnavailableError, QueueFullError, QuotaError
from broker.scripts import Quota

CHAT_DECODER = msgspec.json.Decoder(ChatRequest)
COMPLETION_DECODER = msgspec.json.Decoder(CompletionRequest)

TIMEOUT_HEADER = "x-mtplx-timeout-ms"
IDEMPOTENCY_S = 24 * 3600.0
"""How long a key stands for its request, as long as that has a record."""
ACCEPT_PATIENCE_S = 10.0
"""How long a call waits at least for the queue to take it: its deadline runs from then on, and may be shorter than a
reply of Redis takes."""
FORESIGHT_AGE_S = 2.0
"""A wait may have been foreseen so long ago, and the line it was foreseen for be gone by now."""


class ResolvedModel(NamedTuple):
    """Where a request goes, and how its text is read."""

    route: Route
    bundle: Bundle


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """On which terms a call enters the queue."""

    payer: ApiKeyOwner
    endpoint: str
    timeout_ms: int
    idempotency_key: str | None = None
    said: str = ""
    """Hash of what is asked, where there is an idempotency key; see `api.calls.idempotency.said_by`."""


@dataclass(slots=True)
class Services:
    """One API process."""

    config: ApiConfig
    keys: KeyRing
    backend: Backend
    catalog: Catalog
    bundles: Bundles
    metrics: Metrics
    offline: Offline | None = None
    """Files and batches; None where they are off."""
    detached: Detached | None = None
    """Requests under idempotency keys; None where they are off."""
    chores: BackgroundTasks = field(default_factory=BackgroundTasks)
    is_draining: bool = False

    def payer(self, *, authorization: str | None, host: str) -> ApiKeyOwner:
        """Who asks.

        A server without keys trusts whoever sits at this machine; a web page whose name was made to point here is
        somebody else, and its requests carry that name.

        Raises:
            ApiError: no key of ours, or a name that is not this machine's.
        """
        config = self.config
        is_private = self.keys.is_open and not config.allow_open and is_loopback(config.host)
        if is_private and not names_this_machine(host, config.allow_host):
            raise ApiError(
                f"Host {host!r}: without keys this server answers to loopback names only; "
                "name it (--allow-host), use keys, or serve openly (--allow-open).",
                status=403,
                kind="invalid_request_error",
                code="host_not_allowed",
            )
        return self.keys.payer(authorization)

    async def way(self, body: GenerationRequest) -> ResolvedModel:
        """Where the request goes and how its text is read. Raises: ApiError, BrokerError."""
        if not self.backend.is_connected:
            raise BrokerUnavailableError("Redis does not answer, or the reply subscription is down")
        async with self.backend.while_answering():
            route = await self.catalog.route(body.model, body.numerics_profile)
            return ResolvedModel(route, await self.bundles.get(route.card.tokenizer))

    async def accept(self, job: PreparedCall, way: ResolvedModel, terms: SubmitOptions) -> Answer:
        """Submit all requests of a call, or none. Raises: ApiError, BrokerError."""
        # What is asked again under its key may be there already, and then costs nothing.
        quota = terms.payer.quota if terms.idempotency_key is None else Quota()
        check_fits(job.tickets, quota)
        self._check_wait(job, way, terms)
        choices: list[Choice] = []
        try:
            # In a burst a call waits its turn as long as its deadline allows; a Redis that is silent ends it sooner.
            patience_s = max(terms.timeout_ms / 1000, ACCEPT_PATIENCE_S)
            async with asyncio.timeout(patience_s), self.backend.while_answering():
                for index in range(len(job.works)):
                    handle = await self._submit(job, terms, index)
                    choices.append(self._choice(index, handle, job, way))
                    check_rest(job.tickets, len(choices), quota, handle.accepted)
        except BaseException as error:
            for choice in choices:
                self.chores.spawn(choice.handle.abandon("client"), name="abandon-request")
            if isinstance(error, TimeoutError):
                raise BusyError("The queue did not take the request before its deadline.", code="queue_full") from error
            if isinstance(error, QueueFullError):
                error.retry_after_s = self._wait_s(job, way)
            raise
        meter = self.metrics.call(terms.endpoint, requests=len(choices), prompt_tokens=job.prompt_tokens)
        return Answer(choices, self.chores, meter)

    def _wait_s(self, job: PreparedCall, way: ResolvedModel) -> float | None:
        return self.catalog.wait_s(way.route, job.works[0].ticket.priority)

    def _check_wait(self, job: PreparedCall, way: ResolvedModel, terms: SubmitOptions) -> None:
        """Refuse at once what would wait past its deadline. Raises: BusyError."""
        if terms.idempotency_key is not None:
            return  # it may have been accepted long ago
        wait_s = self._wait_s(job, way)
        if wait_s is not None and (wait_s - FORESIGHT_AGE_S) * 1000 >= terms.timeout_ms:
            message = f"A row is free in about {wait_s:.0f} s, which is past this request's deadline."
            raise BusyError(message, code="queue_full", retry_after_s=wait_s)

    def timeout_ms(self, header: str | None) -> int:
        """The deadline a client asks for, within the longest allowed. Raises: BadRequestError."""
        longest = int(self.config.max_timeout_s * 1000)
        if header is None:
            return min(int(self.config.default_timeout_s * 1000), longest)
        if not (header.isascii() and header.isdigit() and len(header) < 16 and int(header) > 0):
            raise BadRequestError(f"{TIMEOUT_HEADER} is a whole number of milliseconds above 0.", param=TIMEOUT_HEADER)
        return min(int(header), longest)

    async def close(self) -> None:
        await self.chores.finish()
        if self.detached is not None:
            await self.detached.close()
        if self.offline is not None:
            await self.offline.close()
        await self.catalog.close()
        await self.backend.close()

    async def _submit(self, job: PreparedCall, terms: SubmitOptions, index: int) -> RequestHandle:
        work, quota = job.works[index], terms.payer.quota
        try:
            handle = await self.backend.submit(
                work.request,
                work.ticket,
                seed=work.seed,
                timeout_ms=terms.timeout_ms,
                retain_ms=int(self.config.retention_s * 1000),
                quota=quota,
                idempotency=idempotency_of(terms.idempotency_key, index, said=terms.said, keep_s=IDEMPOTENCY_S),
            )
        except QuotaError as error:
            if error.retry_after_s is not None:
                error.retry_after_s = whole_wait_s(job.tickets, work.ticket, quota, error.retry_after_s)
            raise
        if terms.idempotency_key is None or self.detached is None:
            return handle
        return self.detached.hold(handle)

    def _choice(self, index: int, handle: RequestHandle, job: PreparedCall, way: ResolvedModel) -> Choice:
        request = job.works[index].request
        rules = TextRules(
            stops=request.stop,
            hidden=frozenset() if request.ignore_eos else frozenset(way.route.card.eos_token_ids),
            tracks_tokens=job.has_logprobs,
            min_tokens=request.min_tokens,
        )
        return Choice(index, handle, way.bundle.text.stream(rules), has_logprobs=job.has_logprobs)
