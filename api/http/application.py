"""The outermost part of the application: what must be done before a request is routed."""

from __future__ import annotations

from litestar import Litestar
from litestar.datastructures import Headers
from litestar.types import Receive, Scope, Send

from api.formats import error_body
from api.http.callers import foreign_page, is_foreign
from api.responses import send_whole
from api.services import Services


class Application(Litestar):
    """Litestar, with HEAD where there is GET, and refusals of preflights in the shape of every other error."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            services: Services = self.state.services
            headers = Headers.from_scope(scope)
            if is_foreign(headers, services.config.allow_origin):
                error = foreign_page(headers.get("origin", ""))
                services.metrics.answered(scope["path"], error.status)
                return await send_whole(send, error_body(error), status=error.status)
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # type: ignore[typeddict-item]  # uvicorn keeps the body back
        await super().__call__(scope, receive, send)
        return None
