"""Which host names this server answers to, and which web pages may use it.

A browser lets any page send requests to any address. It says where the page comes from (`Origin`, `Sec-Fetch-Site`),
so requests of foreign pages are told apart and refused. Programs send neither header and are served.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from litestar.config.cors import CORSConfig
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from api.config import ApiConfig, is_loopback
from api.errors import ApiError

PUBLIC = {"is_public": True}
"""`opt` of a route that any page may load: it shows the same to everybody and does nothing."""
EVERY_ORIGIN = "*"
EXPOSED_HEADERS = [
    "retry-after",
    "x-mtplx-max-tokens",
    "x-request-id",
    "x-should-retry",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
]
"""Headers of an answer that the script of an allowed page may read."""

_OWN = frozenset({"none", "same-origin"})
"""Values of `Sec-Fetch-Site` of requests that no foreign page made."""
_DEFAULT_PORT = re.compile(r":(80|443)$")


def check_page(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """Guard of every route: refuse what a page of another origin sends, unless its origin is allowed.

    Raises:
        ApiError: the request comes from such a page.
    """
    config: ApiConfig = connection.app.state.services.config
    if not handler.opt.get("is_public") and is_foreign(connection.headers, config.allow_origin):
        raise foreign_page(connection.headers.get("origin", ""))


def is_foreign(headers: Any, allowed: Collection[str]) -> bool:
    """Whether a page of an origin that is not allowed made the request."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
    if origin is None:
        # Images, scripts and the like of a foreign page send no Origin; neither does a link that is followed to here.
        return site not in _OWN and headers.get("sec-fetch-mode") != "navigate"
    if is_listed(origin, allowed) or (EVERY_ORIGIN in allowed and origin != "null"):
        return False
    # Behind a proxy that rewrites Host only the browser's own word tells. No page can forge it.
    return site != "same-origin" and not _is_same(origin, headers.get("host", ""))


def foreign_page(origin: str) -> ApiError:
    """The refusal of such a request."""
    return ApiError(
        f"Pages of another origin ({origin or 'not named'}) may not use this server; --allow-origin ORIGIN lets them.",
        status=403,
        kind="invalid_request_error",
        code="origin_not_allowed",
    )


def cors_of(config: ApiConfig) -> CORSConfig | None:
    """What browsers are told about the allowed origins; None where there is none."""
    if not config.allow_origin:
        return None
    return CORSConfig(allow_origins=[origin.lower() for origin in config.allow_origin], expose_headers=EXPOSED_HEADERS)


def names_this_machine(host: str, allowed: Collection[str]) -> bool:
    """Whether a server on loopback answers to this name: no other machine's name server decides where it leads."""
    name = host.lower().removesuffix(".")
    return name.endswith(".localhost") or is_loopback(name) or is_listed(name, allowed)


def is_listed(name: str, allowed: Collection[str]) -> bool:
    """Whether an origin or host name is one of those an option lists; letters' case does not matter."""
    return any(name.lower() == each.lower() for each in allowed)


def host_name(header: str) -> str:
    """The name in a Host header, without the port; clients older than the header mean this machine."""
    name = header.strip()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0] or "localhost"


def _is_same(origin: str, host: str) -> bool:
    try:
        netloc = urlsplit(origin.lower()).netloc
    except ValueError:
        return False
    return bool(netloc) and _DEFAULT_PORT.sub("", netloc) == _DEFAULT_PORT.sub("", host.strip().lower())
