"""The outermost part of the application: what must be done before a request is routed."""

from __future__ import annotations

from typing import Any

from litestar import Litestar
from litestar.datastructures import Headers

from api.http.callers import foreign_page, is_foreign
from api.http.services import Services
from api.http.sse import send_whole
from api.openai.formats import error_body


class Application(Litestar):
    """Litestar, with HEAD where there is GET, and refusals of preflights in the shape of every other error."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # Litestar's types differ by kind of scope
        method = scope.get("method")
        if method == "OPTIONS" and await self._refuse_preflight(scope, send):
            return
        if method == "HEAD":
            scope = {**scope, "method": "GET"}  # uvicorn, which still sees HEAD, keeps the body back
        await super().__call__(scope, receive, send)

    async def _refuse_preflight(self, scope: Any, send: Any) -> bool:
        """Whether the request came from a foreign page, which was told so."""
        services: Services = self.state.services
        headers = Headers.from_scope(scope)
        if not is_foreign(headers, services.config.allow_origin):
            return False
        error = foreign_page(headers.get("origin", ""))
        services.metrics.answered(scope["path"], error.status)
        await send_whole(send, error_body(error), status=error.status)
        return True
