"""What handlers are given: the process's services, and who asks."""

from __future__ import annotations

from typing import Any, TypeAlias

from litestar import Request
from litestar.datastructures import State
from litestar.di import NamedDependency, Provide

from api.batch.access import Offline
from api.calls.prepare import ApiKeyOwner
from api.errors import ApiError
from api.http.callers import host_name
from api.http.services import Services

HttpRequest: TypeAlias = Request[Any, Any, Any]
OurServices: TypeAlias = NamedDependency[Services]
OurPayer: TypeAlias = NamedDependency[ApiKeyOwner]
OurOffline: TypeAlias = NamedDependency[Offline]


def provide_services(state: State) -> Services:
    services: Services = state.services
    return services


def provide_payer(services: OurServices, request: HttpRequest) -> ApiKeyOwner:
    """Raises: ApiError."""
    return services.payer(
        authorization=request.headers.get("authorization"), host=host_name(request.headers.get("host", ""))
    )


def provide_offline(services: OurServices, payer: OurPayer) -> Offline:
    """Raises: ApiError where this process was given no place for files. An unknown key hears of that first."""
    if services.offline is None:
        message = "Files and batches are off: this process was given no place for files."
        raise ApiError(message, status=501, code="files_off")
    return services.offline


DEPENDENCIES = {
    "services": Provide(provide_services, sync_to_thread=False),
    "payer": Provide(provide_payer, sync_to_thread=False),
    "offline": Provide(provide_offline, sync_to_thread=False),
}
