"""Which pages and which host names the server answers. Engine: none (the queue is a fake)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from litestar.handlers import HTTPRouteHandler

from api.app import HANDLERS, create_app
from api.errors import ApiConfigError
from api.http.callers import names_this_machine
from tests.api.conftest import api_config, http_client, serving
from tests.api.fake import NAME, FakeBackend

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}]}
FRIEND = "https://app.example"
PARAMETERS = {"name:str": "app.js", "name:path": NAME, "file_id:str": "file-1", "batch_id:str": "batch-1"}
PUBLIC = {"/", "/docs", "/static/app.js", "/openapi.json"}
FOREIGN = [
    pytest.param({"origin": "http://evil.example"}, id="another site"),
    pytest.param({"origin": "null"}, id="a page without an origin"),
    pytest.param({"origin": "http://localhost:1"}, id="another port of this machine"),
    pytest.param({"origin": "http://127.0.0.1"}, id="the usual port"),
    pytest.param({"origin": "file://"}, id="a file"),
    pytest.param({"origin": "chrome-extension://abc"}, id="an extension"),
    pytest.param({"origin": "http://[::1"}, id="no origin at all"),
    pytest.param({"origin": ""}, id="an empty origin"),
    pytest.param({"origin": "null", "sec-fetch-site": "cross-site"}, id="a sandboxed frame"),
    pytest.param({"sec-fetch-site": "cross-site"}, id="an image of another site"),
    pytest.param({"sec-fetch-site": "same-site"}, id="an image of another port"),
]


def routes() -> list[tuple[str, str]]:
    """Method and path of every route there is."""
    found = []
    for handler in HANDLERS:
        assert isinstance(handler, HTTPRouteHandler)
        for path in handler.paths:
            for name, value in PARAMETERS.items():
                path = path.replace(f"{{{name}}}", value)
            found += [(str(method), path) for method in handler.http_methods]
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def friendly_url() -> AsyncIterator[str]:
    """A server that lets the pages of a friend in."""
    async with serving(FakeBackend(), api_config(allow_origin=(FRIEND, "tauri://localhost"))) as url:
        yield url


@pytest_asyncio.fixture(loop_scope="session")
async def friendly(friendly_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(friendly_url) as http:
        yield http


def code_of(response: httpx.Response) -> str | None:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["code"])


@pytest.mark.parametrize(("method", "path"), [route for route in routes() if route[1] not in PUBLIC])
async def test_foreign_page_is_refused_on_every_route(http: httpx.AsyncClient, method: str, path: str) -> None:
    response = await http.request(method, path, headers={"origin": "http://evil.example"})

    assert response.status_code == 403
    assert code_of(response) == "origin_not_allowed"


@pytest.mark.parametrize("path", sorted(PUBLIC))
async def test_foreign_page_may_load_what_is_public(http: httpx.AsyncClient, path: str) -> None:
    response = await http.get(path, headers={"origin": "http://evil.example"})

    assert response.status_code == 200


@pytest.mark.parametrize("headers", FOREIGN)
async def test_every_kind_of_foreign_page_is_refused(
    http: httpx.AsyncClient, backend: FakeBackend, headers: dict[str, str]
) -> None:
    response = await http.post(CHAT, json=BODY, headers=headers)

    assert response.status_code == 403
    assert code_of(response) == "origin_not_allowed"
    assert backend.submitted == []


async def test_page_of_this_server_is_served(http: httpx.AsyncClient, url: str) -> None:
    response = await http.post(CHAT, json=BODY, headers={"origin": url, "sec-fetch-site": "same-origin"})

    assert response.status_code == 200


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("LOCALHOST:8000", "http://localhost:8000"),
        ("localhost", "http://localhost"),
        ("localhost:80", "http://localhost"),
    ],
)
async def test_page_of_this_server_is_known_however_its_host_is_written(
    http: httpx.AsyncClient, host: str, origin: str
) -> None:
    response = await http.post(CHAT, json=BODY, headers={"host": host, "origin": origin})

    assert response.status_code == 200


async def test_page_of_this_server_is_known_behind_a_proxy_that_rewrites_the_host(http: httpx.AsyncClient) -> None:
    headers = {"origin": "https://mtplx.example", "sec-fetch-site": "same-origin"}

    assert (await http.post(CHAT, json=BODY, headers=headers)).status_code == 200


async def test_link_from_another_site_may_be_followed_to_what_is_shown(http: httpx.AsyncClient) -> None:
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}

    assert (await http.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize("origin", [FRIEND, "tauri://localhost"])
async def test_page_of_an_allowed_origin_is_served_and_may_read(friendly: httpx.AsyncClient, origin: str) -> None:
    response = await friendly.post(CHAT, json=BODY, headers={"origin": origin, "sec-fetch-site": "cross-site"})

    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == origin
    assert "x-request-id" in response.headers["access-control-expose-headers"]


async def test_page_of_an_allowed_origin_may_read_errors(friendly: httpx.AsyncClient) -> None:
    response = await friendly.post(CHAT, json={}, headers={"origin": FRIEND})

    assert response.status_code == 400
    assert response.headers["access-control-allow-origin"] == FRIEND


@pytest.mark.parametrize("origin", ["https://app.example.evil.example", "http://app.example", "https://x.app.example"])
async def test_origin_must_be_allowed_exactly(friendly: httpx.AsyncClient, origin: str) -> None:
    response = await friendly.post(CHAT, json=BODY, headers={"origin": origin})

    assert response.status_code == 403
    assert "access-control-allow-origin" not in response.headers


async def test_preflight_of_an_allowed_page_is_granted(friendly: httpx.AsyncClient) -> None:
    asked = {
        "origin": FRIEND,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }

    response = await friendly.options(CHAT, headers=asked)

    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == FRIEND
    granted = response.headers["access-control-allow-headers"].lower()
    assert {"authorization", "content-type", "x-stainless-os"} <= {name.strip() for name in granted.split(",")}


@pytest.mark.parametrize("origin", ["http://evil.example", "null"])
async def test_preflight_of_a_foreign_page_is_refused_by_a_name(
    http: httpx.AsyncClient, friendly: httpx.AsyncClient, origin: str
) -> None:
    headers = {"origin": origin, "access-control-request-method": "POST"}

    for client in (http, friendly):
        response = await client.options(CHAT, headers=headers)
        assert response.status_code == 403
        assert code_of(response) == "origin_not_allowed"
        assert "access-control-allow-origin" not in response.headers


async def test_every_origin_may_be_allowed_where_serving_is_open(backend: FakeBackend) -> None:
    config = api_config(allow_origin=("*",), allow_open=True)

    async with serving(backend, config) as url, http_client(url) as http:
        foreign = await http.post(CHAT, json=BODY, headers={"origin": "http://any.example"})
        opaque = await http.post(CHAT, json=BODY, headers={"origin": "null"})

    assert (foreign.status_code, foreign.headers["access-control-allow-origin"]) == (200, "*")
    assert opaque.status_code == 403


async def test_every_origin_without_keys_is_refused_at_the_start() -> None:
    with pytest.raises(ApiConfigError, match=r"allow_origin = '\*' without keys"):
        create_app(api_config(allow_origin=("*",)))


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://*.example", "null", "https://"])
async def test_allowed_origin_that_is_none_is_refused_by_name(origin: str) -> None:
    with pytest.raises(ApiConfigError, match="allow_origin = .*allowed"):
        api_config(allow_origin=(origin,))


@pytest.mark.parametrize("host", ["studio.local:80", "https://studio", "a b", "*"])
async def test_allowed_host_that_is_none_is_refused_by_name(host: str) -> None:
    with pytest.raises(ApiConfigError, match="allow_host = .*allowed"):
        api_config(allow_host=(host,))


@pytest.mark.parametrize(
    "host",
    ["LOCALHOST", "LocalHost:8000", "localhost.", "localhost.:8000", "api.localhost", "a.b.LOCALHOST.", "[::1]"]
    + ["[::ffff:127.0.0.1]:8000", "127.8.9.1"],
)
async def test_every_name_of_loopback_is_served(http: httpx.AsyncClient, host: str) -> None:
    assert (await http.get("/v1/models", headers={"host": host})).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "notlocalhost", "host.docker.internal"])
async def test_other_names_are_refused_and_the_option_is_named(http: httpx.AsyncClient, host: str) -> None:
    response = await http.get("/v1/models", headers={"host": host})

    assert response.status_code == 403
    assert code_of(response) == "host_not_allowed"
    assert "--allow-host" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/metrics"])
async def test_state_is_shown_under_any_name(http: httpx.AsyncClient, path: str) -> None:
    assert (await http.get(path, headers={"host": "balancer.example"})).status_code == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [("host.docker.internal", True), ("studios-mac.local", True), ("STUDIOS-MAC.LOCAL.", True), ("mac.local", False)],
)
async def test_names_that_were_allowed_are_answered(host: str, expected: bool) -> None:
    assert names_this_machine(host, ("host.docker.internal", "Studios-Mac.local")) is expected
