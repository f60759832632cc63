"""What handlers are given: the process's services, and who asks."""

from __future__ import annotations

from typing import Any, TypeAlias

from litestar import Request
from litestar.datastructures import State
from litestar.di import NamedDependency, Provide

from api.intake import Payer
from api.services import Services

HttpRequest: TypeAlias = Request[Any, Any, Any]
OurServices: TypeAlias = NamedDependency[Services]
OurPayer: TypeAlias = NamedDependency[Payer]


def provide_services(state: State) -> Services:
    services: Services = state.services
    return services


def provide_payer(services: OurServices, request: HttpRequest) -> Payer:
    """Raises: InvalidKeyError."""
    return services.keys.payer(request.headers.get("authorization"))


DEPENDENCIES = {
    "services": Provide(provide_services, sync_to_thread=False),
    "payer": Provide(provide_payer, sync_to_thread=False),
}
