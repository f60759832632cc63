"""The page at `/` and the API's description: plain files of this package, no build step, no outside address."""

from __future__ import annotations

from importlib.resources import files

from litestar import get
from litestar.params import FromPath
from litestar.types import ASGIApp

from api.errors import ApiError
from api.http.callers import PUBLIC
from api.http.dependencies import OurServices
from api.http.openapi import description
from api.http.sse import JsonResponse

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_STATIC = ("app.js", "batches.js", "docs.js", "events.js", "icon.svg", "lanes.js", "style.css")

_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@get("/", sync_to_thread=False, opt=PUBLIC)
def get_page() -> ASGIApp:
    """Chat and lanes."""
    return _file("index.html")


@get("/docs", sync_to_thread=False, opt=PUBLIC)
def get_docs() -> ASGIApp:
    """The API's description as a page."""
    return _file("docs.html")


@get("/static/{name:str}", sync_to_thread=False, opt=PUBLIC)
def get_static(name: FromPath[str]) -> ASGIApp:
    """What the pages are made of."""
    if name not in _STATIC:
        raise ApiError("There is nothing at this path.", status=404, kind="invalid_request_error")
    return _file(name)


@get("/openapi.json", opt=PUBLIC)
async def get_openapi(services: OurServices) -> ASGIApp:
    """The API's description."""
    body = description(has_files=services.offline is not None)
    return JsonResponse(body, headers={"access-control-allow-origin": "*"})


def _file(name: str) -> JsonResponse:
    body = (files("api") / "static" / name).read_bytes()
    kind = _TYPES[name.rpartition(".")[2]]
    return JsonResponse(body, headers={**_HEADERS, "content-type": f"{kind}; charset=utf-8"})
