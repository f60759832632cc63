"""Bodies as HTTP lets clients send them: types, encodings, marks, methods. Engine: none (the queue is a fake)."""

from __future__ import annotations

import bz2
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from tests.api.conftest import api_config, http_client, serving
from tests.api.fake import NAME, FakeBackend
from tests.api.http.test_refusals import error_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": NAME, "messages": [{"role": "user", "content": "Füchse 漢字"}]},
    TEXT: {"model": NAME, "prompt": "Füchse 漢字"},
}
JSON = {"content-type": "application/json"}


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def members(data: bytes) -> bytes:
    return gzip.compress(data[:20]) + gzip.compress(data[20:])


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "declared",
    [
        None,
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "json",
        "text/json",
    ]
    + ["application/jsonp", "application/json-patch+json"],
)
async def test_body_that_is_not_declared_as_json_is_415(
    http: httpx.AsyncClient, backend: FakeBackend, path: str, declared: str | None
) -> None:
    headers = {} if declared is None else {"content-type": declared}

    response = await http.post(path, content=json.dumps(BODIES[path]).encode(), headers=headers)

    assert response.status_code == 415
    assert "application/json" in error_of(response)["message"]
    assert backend.submitted == []


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "declared",
    ["application/json", "Application/JSON", "application/json; charset=utf-8", 'application/json;charset="UTF8"']
    + ["application/json; charset=us-ascii", "application/json; odd=1"],
)
async def test_json_is_known_however_it_is_declared(http: httpx.AsyncClient, path: str, declared: str) -> None:
    body = json.dumps(BODIES[path], ensure_ascii=False).encode()

    response = await http.post(path, content=body, headers={"content-type": declared})

    assert response.status_code == 200


@pytest.mark.parametrize("charset", ["utf-16", "UTF-32", "iso-8859-1", "windows-1252", "klingon"])
async def test_other_character_sets_are_415_by_name(http: httpx.AsyncClient, charset: str) -> None:
    headers = {"content-type": f"application/json; charset={charset}"}

    response = await http.post(CHAT, json=BODIES[CHAT], headers=headers)

    assert response.status_code == 415
    assert charset.lower() in error_of(response)["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_byte_order_mark_of_utf8_is_read_over(http: httpx.AsyncClient, path: str) -> None:
    body = json.dumps(BODIES[path]).encode("utf-8-sig")

    assert (await http.post(path, content=body, headers=JSON)).status_code == 200


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
async def test_other_byte_order_marks_are_named(http: httpx.AsyncClient, encoding: str) -> None:
    mark = b"\xfe\xff" if encoding == "utf-16-be" else b""

    response = await http.post(CHAT, content=mark + json.dumps(BODIES[CHAT]).encode(encoding), headers=JSON)

    assert response.status_code == 400
    assert encoding[:6].upper() in error_of(response)["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        pytest.param("gzip", gzip.compress, id="gzip"),
        pytest.param("GZip", gzip.compress, id="in capitals"),
        pytest.param("x-gzip", gzip.compress, id="old name"),
        pytest.param("gzip", members, id="several members"),
        pytest.param("deflate", zlib.compress, id="deflate"),
        pytest.param("deflate", raw_deflate, id="deflate without a header"),
        pytest.param("identity", bytes, id="identity"),
        pytest.param("identity, gzip", gzip.compress, id="identity and gzip"),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 10_000], ids=["by the byte", "in pieces", "at once"])
async def test_encoded_body_is_decoded(
    http: httpx.AsyncClient, backend: FakeBackend, path: str, encoding: str, pack: Callable[[bytes], bytes], step: int
) -> None:
    packed = pack(json.dumps(BODIES[path]).encode())

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(packed), step):
            yield packed[start : start + step]

    response = await http.post(path, content=pieces(), headers={**JSON, "content-encoding": encoding})

    assert response.status_code == 200, response.text
    assert len(backend.submitted) == 1


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "bzip2", "gzip, gzip", "chunked"])
async def test_other_encodings_are_415_by_name(http: httpx.AsyncClient, encoding: str) -> None:
    body = bz2.compress(json.dumps(BODIES[CHAT]).encode())

    response = await http.post(CHAT, content=body, headers={**JSON, "content-encoding": encoding})

    assert response.status_code == 415
    assert encoding in error_of(response)["message"]
    assert response.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda data: data[:-5], id="cut"),
        pytest.param(lambda data: data[:10] + b"\xff\xff\xff" + data[13:], id="spoilt"),
        pytest.param(lambda data: data + b"more", id="something behind it"),
        pytest.param(lambda _: b'{"model": "tiny"}', id="not encoded"),
    ],
)
async def test_body_that_is_not_encoded_as_declared_is_400(
    http: httpx.AsyncClient, encoding: str, spoil: Callable[[bytes], bytes]
) -> None:
    pack = gzip.compress if encoding == "gzip" else zlib.compress
    body = spoil(pack(json.dumps(BODIES[CHAT]).encode()))

    response = await http.post(CHAT, content=body, headers={**JSON, "content-encoding": encoding})

    assert response.status_code == 400
    assert encoding in error_of(response)["message"]


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("deflate", raw_deflate), ("identity", bytes)],
)
@pytest.mark.parametrize("is_sized", [True, False], ids=["with a length", "in chunks"])
async def test_body_over_the_limit_is_413_also_when_it_is_so_only_once_decoded(
    backend: FakeBackend, encoding: str, pack: Callable[[bytes], bytes], is_sized: bool
) -> None:
    bomb = pack(json.dumps({**BODIES[CHAT], "user": "x" * 3_000_000}).encode())

    async def pieces() -> AsyncIterator[bytes]:
        yield bomb

    async with serving(backend, api_config(body_limit_bytes=100_000)) as url, http_client(url) as http:
        headers = {**JSON, "content-encoding": encoding}
        response = await http.post(CHAT, content=bomb if is_sized else pieces(), headers=headers)

    assert response.status_code == 413
    error_of(response)
    assert backend.submitted == []


@pytest.mark.parametrize(
    "path", ["/health", "/metrics", "/v1/models", f"/v1/models/{NAME}", "/", "/docs", "/openapi.json"]
)
async def test_head_answers_like_get_without_the_body(http: httpx.AsyncClient, path: str) -> None:
    got, head = await http.get(path), await http.head(path)

    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    assert "content-length" in head.headers


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, {"POST", "OPTIONS"}),
        ("HEAD", CHAT, {"POST", "OPTIONS"}),
        ("PUT", TEXT, {"POST", "OPTIONS"}),
        ("POST", "/v1/models", {"GET", "HEAD", "OPTIONS"}),
        ("PATCH", "/health", {"GET", "HEAD", "OPTIONS"}),
        ("PROPFIND", "/health", {"GET", "HEAD", "OPTIONS"}),
        ("TRACE", "/health", {"GET", "HEAD", "OPTIONS"}),
    ],
)
async def test_other_methods_are_405_and_the_right_ones_are_named(
    http: httpx.AsyncClient, method: str, path: str, allowed: set[str]
) -> None:
    response = await http.request(method, path)

    assert response.status_code == 405
    assert {name.strip() for name in response.headers["allow"].split(",")} == allowed


@pytest.mark.parametrize(("path", "allowed"), [(CHAT, {"POST", "OPTIONS"}), ("/health", {"GET", "HEAD", "OPTIONS"})])
async def test_options_names_the_methods(http: httpx.AsyncClient, path: str, allowed: set[str]) -> None:
    response = await http.options(path)

    assert response.status_code == 204
    assert {name.strip() for name in response.headers["allow"].split(",")} == allowed
