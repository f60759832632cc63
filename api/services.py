"""Everything the handlers of one process share, and the one way from a body to an accepted answer."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from api.access import KeyRing
from api.answers import Answer, Choice, Chores
from api.backend import Backend, Handle
from api.bundles import Bundle, Bundles
from api.config import ApiConfig
from api.errors import BadRequestError, from_broker
from api.intake import Job
from api.metrics import Metrics
from api.models import Catalog, Route
from api.schemas import ChatRequest, CompletionRequest, GenerationRequest
from api.text import TextRules
from broker.errors import BrokerError

CHAT_DECODER = msgspec.json.Decoder(ChatRequest)
COMPLETION_DECODER = msgspec.json.Decoder(CompletionRequest)

TIMEOUT_HEADER = "x-mtplx-timeout-ms"


@dataclass(slots=True)
class Services:
    """One API process."""

    config: ApiConfig
    keys: KeyRing
    backend: Backend
    catalog: Catalog
    bundles: Bundles
    metrics: Metrics
    chores: Chores = field(default_factory=Chores)
    is_draining: bool = False

    async def route(self, body: GenerationRequest) -> tuple[Route, Bundle]:
        """Where the request goes and how its text is read. Raises: ApiError, BrokerError."""
        route = await self.catalog.route(body.model, body.numerics_profile)
        return route, await self.bundles.get(route.card.tokenizer)

    async def accept(self, job: Job, route: Route, bundle: Bundle, *, endpoint: str, timeout_ms: int) -> Answer:
        """Submit all requests of a call, or none. Raises: ApiError."""
        choices: list[Choice] = []
        try:
            for index, work in enumerate(job.works):
                handle = await self.backend.submit(
                    work.request,
                    work.ticket,
                    seed=work.seed,
                    timeout_ms=timeout_ms,
                    retain_ms=int(self.config.retention_s * 1000),
                )
                choices.append(self._choice(index, handle, job, route, bundle))
        except BaseException as error:
            for choice in choices:
                self.chores.spawn(choice.handle.abandon("client"), name="abandon-request")
            if isinstance(error, BrokerError):
                raise from_broker(error) from error
            raise
        meter = self.metrics.call(endpoint, requests=len(choices), prompt_tokens=job.prompt_tokens)
        return Answer(choices, self.chores, meter)

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
        await self.backend.close()

    def _choice(self, index: int, handle: Handle, job: Job, route: Route, bundle: Bundle) -> Choice:
        request = job.works[index].request
        rules = TextRules(
            stops=request.stop,
            hidden=frozenset() if request.ignore_eos else frozenset(route.card.eos_token_ids),
            tracks_tokens=job.has_logprobs,
        )
        return Choice(index, handle, bundle.text.stream(rules), has_logprobs=job.has_logprobs)
