"""Streams byte by byte: comments, errors after the headers, and clients that leave. Engine: none (a fake queue)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from broker.wire import Cause, Failed
from tests.api.conftest import api_config, http_client, serving, wait_until
from tests.api.fake import NAME, FakeBackend, Script

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "stream": True}


async def lines_of(http: httpx.AsyncClient, body: dict[str, Any], path: str = CHAT) -> list[str]:
    async with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        return [line async for line in response.aiter_lines() if line]


def chunks_of(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


async def first_line(lines: AsyncIterator[str]) -> str:
    return await anext(lines)


async def test_stream_ends_with_done(http: httpx.AsyncClient) -> None:
    lines = await lines_of(http, BODY)

    assert lines[-1] == "data: [DONE]"
    assert lines.count("data: [DONE]") == 1


async def test_stream_is_declared_as_one_that_no_proxy_holds_back(http: httpx.AsyncClient) -> None:
    async with http.stream("POST", CHAT, json=BODY) as response:
        await response.aread()

    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"].startswith("chatcmpl-")


async def test_stream_sends_headers_and_role_before_the_first_token(
    http: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.gate.clear()

    async with http.stream("POST", CHAT, json=BODY) as response:
        line = await first_line(response.aiter_lines())
        assert response.status_code == 200
        assert chunks_of([line])[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


async def test_quick_stream_has_no_comments(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script = lambda _: Script(prefill=(512, 1024))

    lines = await lines_of(http, BODY)

    assert [line for line in lines if line.startswith(":")] == []


async def test_stream_shows_prefill_as_comments_once_it_is_silent(backend: FakeBackend) -> None:
    backend.script = lambda _: Script(text="", prefill=(512, 1024), hangs=True)

    async with (
        serving(backend, api_config(keep_alive_s=0.02)) as url,
        http_client(url) as http,
        http.stream("POST", CHAT, json=BODY) as response,
    ):
        lines = response.aiter_lines()
        comments = [line async for line in take(lines, 8) if line.startswith(":")]

    assert comments[-1] == ": prefill 1024/1024"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_no_comment_is_a_block_of_its_own(backend: FakeBackend, path: str) -> None:
    backend.gate.clear()
    backend.script = lambda _: Script(prefill=(512, 1024))
    body = BODY if path == CHAT else {"model": NAME, "prompt": "Hi", "stream": True}
    data = b""

    async with (
        serving(backend, api_config(keep_alive_s=0.02)) as url,
        http_client(url) as http,
        http.stream("POST", path, json=body) as response,
    ):
        async for piece in response.aiter_raw():
            data += piece
            if data.count(b": keep-alive\n") == 3:
                backend.gate.set()

    *blocks, rest = data.split(b"\n\n")
    assert data.count(b": keep-alive\n") >= 3
    assert all(any(line.startswith(b"data: ") for line in block.split(b"\n")) for block in blocks)
    assert (blocks[-1], rest) == (b"data: [DONE]", b"")


@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_answer_has_no_character_that_ends_a_line_but_for_json_or_http(
    http: httpx.AsyncClient, backend: FakeBackend, path: str, is_streamed: bool
) -> None:
    text = "a\u2028b\u2029c\u0085d\x0b\x0c\x1c\x1d\x1e\r\ne"
    backend.script = lambda _: Script(text=text)
    body = {**BODY, "stream": is_streamed} if path == CHAT else {"model": NAME, "prompt": "x", "stream": is_streamed}

    response = await http.post(path, json={**body, "user": text})

    assert [line for line in response.text.splitlines() if line] == [line for line in response.text.split("\n") if line]
    chunks = chunks_of(response.text.split("\n")) if is_streamed else [response.json()]
    parts = [choice.get("delta") or choice.get("message") or choice for each in chunks for choice in each["choices"]]
    assert "".join(part.get("content", part.get("text", "")) or "" for part in parts) == text


async def test_error_has_no_character_that_ends_a_line_but_for_json(http: httpx.AsyncClient) -> None:
    response = await http.post(CHAT, json={**BODY, "model": "a\u2028b\u0085c"})

    assert response.text.splitlines() == [response.text]
    assert "a\\u2028b" in response.json()["error"]["message"]


async def test_stream_sends_comments_in_silence(backend: FakeBackend) -> None:
    backend.gate.clear()

    async with (
        serving(backend, api_config(keep_alive_s=0.02)) as url,
        http_client(url) as http,
        http.stream("POST", CHAT, json=BODY) as response,
    ):
        lines = response.aiter_lines()
        comments = [line async for line in take(lines, 8) if line.startswith(":")]

    assert set(comments) == {": keep-alive"}


async def take(lines: AsyncIterator[str], count: int) -> AsyncIterator[str]:
    for _ in range(count):
        yield await anext(lines)


async def test_error_after_the_headers_ends_the_stream_without_done(
    http: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.script = lambda request: Script(failure=Failed(request.id, "engine", "the row went wrong"))

    lines = await lines_of(http, BODY)

    assert json.loads(lines[-1][6:]) == {
        "error": {"message": "the row went wrong", "type": "server_error", "param": None, "code": "engine"}
    }
    assert not any("[DONE]" in line for line in lines)
    assert not any(choice["finish_reason"] for chunk in chunks_of(lines) for choice in chunk.get("choices", []))


@pytest.mark.parametrize("cause", ["listener", "shutdown"])
async def test_stream_that_was_cancelled_under_its_client_ends_with_an_error(
    http: httpx.AsyncClient, backend: FakeBackend, cause: Cause
) -> None:
    backend.script = lambda request: Script(reason="cancelled", cause=cause)

    lines = await lines_of(http, BODY)

    assert json.loads(lines[-1][6:])["error"]["code"] == cause
    assert not any("[DONE]" in line for line in lines)


async def test_error_of_one_choice_ends_the_others(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script = lambda request: (
        Script(failure=Failed(request.id, "engine", "wrong")) if request.id.endswith("-1") else Script(hangs=True)
    )

    lines = await lines_of(http, {**BODY, "n": 2})

    await wait_until(lambda: backend.running == set())
    assert "error" in json.loads(lines[-1][6:])


async def test_failure_becomes_a_status_when_nothing_is_streamed(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script = lambda request: Script(failure=Failed(request.id, "over_capacity", "no memory for it"))

    response = await http.post(CHAT, json={**BODY, "stream": False})

    assert response.status_code == 503
    assert response.json()["error"]["code"] == "over_capacity"


@pytest.mark.parametrize("copies", [1, 3])
async def test_client_that_leaves_a_stream_cancels_its_requests(
    http: httpx.AsyncClient, backend: FakeBackend, copies: int
) -> None:
    backend.script = lambda _: Script(hangs=True)

    async with http.stream("POST", CHAT, json={**BODY, "n": copies}) as response:
        await first_line(response.aiter_lines())

    await wait_until(lambda: len(backend.abandoned) == copies)
    assert set(backend.abandoned.values()) == {"client"}


async def test_client_that_leaves_before_the_whole_answer_cancels_its_request(
    http: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.script = lambda _: Script(hangs=True)

    with pytest.raises(httpx.ReadTimeout):
        await http.post(CHAT, json={**BODY, "stream": False}, timeout=0.2)

    await wait_until(lambda: list(backend.abandoned.values()) == ["client"])


async def test_answered_requests_are_not_cancelled(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    await lines_of(http, BODY)
    await http.post(CHAT, json={**BODY, "stream": False})

    assert backend.abandoned == {}


async def test_open_streams_are_cancelled_when_the_server_ends(backend: FakeBackend) -> None:
    backend.script = lambda _: Script(hangs=True)

    async with http_client("http://unused") as http:
        async with serving(backend) as url:
            request = http.build_request("POST", f"{url}{CHAT}", json=BODY)
            response = await http.send(request, stream=True)
            lines = response.aiter_lines()  # dropped, it would close the response
            await first_line(lines)
        await response.aclose()

    assert list(backend.abandoned.values()) == ["shutdown"]
    assert backend.is_closed


async def test_half_a_character_waits_for_its_other_half(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script = lambda _: Script(text="😀漢")

    chunks = chunks_of(await lines_of(http, BODY))

    texts = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
    assert "".join(texts) == "😀漢"
    assert not any("\ufffd" in text for text in texts)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("max_tokens", range(1, 6))
async def test_text_that_is_cut_inside_a_character_ends_before_it(
    http: httpx.AsyncClient, backend: FakeBackend, path: str, max_tokens: int
) -> None:
    backend.script = lambda _: Script(text="😀漢")
    asked = {**(BODY if path == CHAT else {"model": NAME, "prompt": "x"}), "max_tokens": max_tokens}

    streamed = chunks_of(await lines_of(http, {**asked, "stream": True}, path))
    whole = (await http.post(path, json={**asked, "stream": False})).json()["choices"][0]

    texts = [
        choice.get("text") or choice.get("delta", {}).get("content", "") for c in streamed for choice in c["choices"]
    ]
    assert "".join(texts) == (whole["text"] if "text" in whole else whole["message"]["content"])
    assert "😀漢".startswith("".join(texts))
    assert streamed[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == "length"
