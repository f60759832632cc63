"""Puts the application together: routes, dependencies, one lifespan, and the error shape for everything."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from litestar import Litestar
from litestar.enums import MediaType, ScopeType
from litestar.exceptions import HTTPException
from litestar.response import Response
from litestar.types import Message, Scope

from api.auth import load_keys
from api.batch.access import Offline
from api.calls.idempotency import Detached
from api.config import ApiConfig
from api.errors import ApiError, from_broker
from api.fleet.backend import Backend, RedisBackend
from api.fleet.catalog import SILENT_LEASES, SILENT_S, Catalog
from api.fleet.metrics import Metrics
from api.http.application import Application
from api.http.batches import cancel_batch, create_batch, get_batch, list_batches
from api.http.callers import check_page, cors_of
from api.http.completions import create_chat_completion, create_completion
from api.http.dependencies import DEPENDENCIES, HttpRequest
from api.http.files import create_file, delete_file, get_file, get_file_content, list_files
from api.http.models_health import get_health, get_metrics, get_model, list_models
from api.http.pages import get_docs, get_openapi, get_page, get_static
from api.http.services import Services
from api.openai.formats import error_body
from api.text.tokenizers import Bundles
from broker.client.client import Client
from broker.errors import BrokerError, BrokerUnavailableError
from broker.scripts import Bounds

logger = logging.getLogger(__name__)

OpenBackend = Callable[[ApiConfig], Awaitable[Backend]]

HANDLERS = [
    create_chat_completion,
    create_completion,
    list_models,
    get_model,
    create_file,
    list_files,
    get_file,
    get_file_content,
    delete_file,
    create_batch,
    list_batches,
    get_batch,
    cancel_batch,
    get_health,
    get_metrics,
    get_page,
    get_docs,
    get_static,
    get_openapi,
]


async def open_redis(config: ApiConfig) -> Backend:
    """Raises: BrokerUnavailableError."""
    bounds = Bounds(config.queue_requests_max, config.queue_tokens_max)
    return RedisBackend(await Client.open(config.redis_url, bounds=bounds, connections=config.redis_connections))


def create_app(config: ApiConfig, *, open_backend: OpenBackend = open_redis) -> Application:
    """The application; it connects when it starts and closes what it opened when it ends.

    Raises:
        ApiConfigError: the keys file is wrong, or the address would be open to everybody.
    """
    config.check_exposure()
    keys = load_keys(config.keys_file)

    @asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        backend = await open_backend(config)
        catalog = Catalog(
            backend,
            age_s=config.registry_age_s,
            lane_grace_s=config.lane_grace_s,
            stall_s=config.stall_s,
            silent_s=max(SILENT_S, SILENT_LEASES * config.lease_s),
        )
        catalog.look_on()
        guard, files_url = backend.while_answering, config.files_url
        services = Services(
            config=config,
            keys=keys,
            backend=backend,
            catalog=catalog,
            bundles=Bundles(backend.tokenizer_files),
            metrics=Metrics(lambda: catalog.last),
            detached=Detached(backend, config.detach_s),
            offline=Offline.over(config.redis_url, files_url, guard=guard) if files_url else None,
        )
        app.state.services = services
        try:
            yield
        finally:
            await services.close()

    return Application(
        HANDLERS,
        guards=[check_page],
        cors_config=cors_of(config),
        lifespan=[lifespan],
        dependencies=DEPENDENCIES,
        exception_handlers={Exception: answer_error},
        before_send=[count_response, name_head],
        request_max_body_size=config.body_limit_bytes,
        openapi_config=None,
        logging_config=None,
    )


async def count_response(message: Message, scope: Scope) -> None:
    """Every answer counts, the refused ones included."""
    if message["type"] == "http.response.start" and scope["type"] == ScopeType.HTTP:
        services: Services = scope["litestar_app"].state.services
        services.metrics.answered(scope["path"], message["status"])


async def name_head(message: Message, _: Scope) -> None:
    """Every GET route takes HEAD too, and an Allow header says so."""
    if message["type"] == "http.response.start":
        message["headers"] = [
            (name, value.replace(b"GET", b"GET, HEAD") if name.lower() == b"allow" else value)
            for name, value in message["headers"]
        ]


def answer_error(request: HttpRequest, error: Exception) -> Response[bytes]:
    """Any failure in OpenAI's shape."""
    answer = as_api_error(error)
    if isinstance(error, BrokerUnavailableError):
        logger.warning("%s %s refused: %s", request.method, request.scope["path"], error)
    elif answer.status >= 500 and not isinstance(error, ApiError | BrokerError):
        logger.error("%s %s failed", request.method, request.scope["path"], exc_info=error)
    return Response(error_body(answer), status_code=answer.status, media_type=MediaType.JSON, headers=answer.headers)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of a failure."""
    match error:
        case ApiError():
            return error
        case BrokerError():
            return from_broker(error)
        case HTTPException():
            kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
            headers = {str(name): str(value) for name, value in (error.headers or {}).items()}
            return ApiError(_words(error), status=error.status_code, kind=kind, headers=headers)
        case _:
            return ApiError("The server failed to handle this request.", code="internal_error")


def _words(error: HTTPException) -> str:
    words: dict[int, Any] = {
        404: "There is nothing at this path.",
        405: "This path does not take this method.",
        413: "The body is larger than this server takes.",
    }
    return str(words.get(error.status_code, error.detail))
