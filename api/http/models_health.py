"""The small GET endpoints: models, health, metrics."""

from __future__ import annotations

import contextlib

from litestar import get
from litestar.params import FromPath
from litestar.types import ASGIApp

from api.fleet.health import take_health
from api.fleet.metrics import CONTENT_TYPE
from api.http.dependencies import OurPayer, OurServices
from api.http.sse import JsonResponse
from api.openai.schemas import ModelList
from api.text.json_text import encode_json
from broker.errors import BrokerError


@get("/v1/models")
async def list_models(services: OurServices, payer: OurPayer) -> ASGIApp:
    """Every model that a worker has served."""
    return JsonResponse(encode_json(ModelList(await services.catalog.models())))


@get("/v1/models/{name:path}")
async def get_model(services: OurServices, payer: OurPayer, name: FromPath[str]) -> ASGIApp:
    """One model, by name or identity."""
    return JsonResponse(encode_json(await services.catalog.model(str(name).removeprefix("/"))))


@get("/health")
async def get_health(services: OurServices) -> ASGIApp:
    """One word for balancers, with the lanes for people."""
    health = await take_health(
        services.catalog,
        is_draining=services.is_draining,
        is_connected=services.backend.is_connected,
        open_requests=services.metrics.open_requests,
    )
    return JsonResponse(encode_json(health), status=health.http_status)


@get("/metrics")
async def get_metrics(services: OurServices) -> ASGIApp:
    """Prometheus' text format."""
    with contextlib.suppress(BrokerError):  # while Redis is away the last picture is shown
        async with services.backend.while_answering():
            await services.catalog.fleet()
            if services.offline is not None:
                services.metrics.show_batches(await services.offline.desk.open_batches())
    return JsonResponse(services.metrics.render(), headers={"content-type": CONTENT_TYPE})
