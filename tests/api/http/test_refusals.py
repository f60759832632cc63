"""What is refused, and that it is said in OpenAI's error shape. Engine: none (the queue is a fake)."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from api.fleet.backend import Fleet
from broker.errors import (
    BrokerUnavailableError,
    ConflictError,
    QueueFullError,
    QuotaError,
    RefusedError,
)
from tests.api.conftest import api_config, http_client, serving
from tests.api.fake import CONTEXT, IDENTITY, NAME, FakeBackend, Script, fleet, worker

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
CHAT_BODY: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}]}
TEXT_BODY: dict[str, Any] = {"model": NAME, "prompt": "Hello"}


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object, whose shape must be right in every answer."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"seed": 2**70}, "seed"),
        ({"stop": ["a"] * 20}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": 5}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"modalities": ["audio"]}, "modalities[0]"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ({"numerics_profile": "exact"}, "numerics_profile"),
        ({"numerics_profile": "b1-exact"}, "numerics_profile"),
        ({"model": 5}, "model"),
    ],
    ids=str,
)
async def test_chat_names_the_field_it_refuses(
    http: httpx.AsyncClient, backend: FakeBackend, change: dict[str, Any], param: str | None
) -> None:
    response = await http.post(CHAT, json={**CHAT_BODY, **change})

    error = error_of(response)
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
    assert backend.submitted == []


@pytest.mark.parametrize("missing", ["model", "messages"])
async def test_chat_names_the_field_that_is_missing(http: httpx.AsyncClient, missing: str) -> None:
    body = {name: value for name, value in CHAT_BODY.items() if name != missing}

    response = await http.post(CHAT, json=body)

    assert response.status_code == 400
    assert error_of(response)["param"] == missing


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"prompt": [-1]}, None),
        ({"prompt": None}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": []}, "tools"),
    ],
    ids=str,
)
async def test_completion_names_the_field_it_refuses(
    http: httpx.AsyncClient, change: dict[str, Any], param: str | None
) -> None:
    response = await http.post(TEXT, json={**TEXT_BODY, **change})

    assert response.status_code == 400
    if param is not None:
        assert error_of(response)["param"] == param


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": "\\ud800"}', b"[" * 100_000, b'{"a":' * 5000, b"NaN"],
    ids=["empty", "cut", "list", "null", "no utf-8", "half a surrogate", "deep list", "deep object", "nan"],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_malformed_bodies_are_400(http: httpx.AsyncClient, path: str, data: bytes) -> None:
    response = await http.post(path, content=data, headers={"content-type": "application/json"})

    assert response.status_code == 400
    error_of(response)


async def test_a_lone_surrogate_in_a_message_is_400(http: httpx.AsyncClient) -> None:
    body = json.dumps({**CHAT_BODY, "messages": [{"role": "user", "content": "a\ud800b"}], "stop": "\udfff"})

    response = await http.post(CHAT, content=body.encode(), headers={"content-type": "application/json"})

    assert response.status_code == 400
    error_of(response)


async def test_other_content_types_are_415(http: httpx.AsyncClient) -> None:
    response = await http.post(CHAT, content=json.dumps(CHAT_BODY), headers={"content-type": "text/plain"})

    assert response.status_code == 415
    error_of(response)


async def test_unknown_paths_are_404_in_the_same_shape(http: httpx.AsyncClient) -> None:
    response = await http.get("/v1/nothing")

    assert response.status_code == 404
    error_of(response)


@pytest.mark.parametrize(("method", "path"), [("GET", CHAT), ("POST", "/v1/models"), ("DELETE", "/health")])
async def test_other_methods_are_405_in_the_same_shape(http: httpx.AsyncClient, method: str, path: str) -> None:
    response = await http.request(method, path)

    assert response.status_code == 405
    assert response.headers["allow"]
    error_of(response)


async def test_a_body_over_the_limit_is_413(backend: FakeBackend) -> None:
    async with serving(backend, api_config(body_limit_bytes=2048)) as url, http_client(url) as http:
        response = await http.post(CHAT, json={**CHAT_BODY, "user": "x" * 4000})

    assert response.status_code == 413
    error_of(response)


@pytest.mark.parametrize("method", ["post", "get"])
async def test_an_unknown_model_is_404(http: httpx.AsyncClient, method: str) -> None:
    if method == "post":
        response = await http.post(CHAT, json={**CHAT_BODY, "model": "gpt-99"})
    else:
        response = await http.get("/v1/models/gpt-99")

    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


async def test_a_prompt_longer_than_the_context_is_400(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    response = await http.post(TEXT, json={"model": NAME, "prompt": [5] * CONTEXT})

    error = error_of(response)
    assert response.status_code == 400
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert backend.submitted == []


async def test_a_too_long_max_tokens_is_clamped_and_said_so(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    response = await http.post(TEXT, json={"model": NAME, "prompt": [5] * 200, "max_tokens": 1000})

    assert response.status_code == 200
    assert response.headers["x-mtplx-max-tokens"] == "56"
    assert backend.requests[0].max_tokens == 56


async def test_max_tokens_goes_up_to_the_context_when_absent(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    response = await http.post(TEXT, json={"model": NAME, "prompt": [5] * 200})

    assert "x-mtplx-max-tokens" not in response.headers
    assert backend.requests[0].max_tokens == 56


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (QueueFullError("full"), 503, "queue_full"),
        (QuotaError("slow down", retry_after_s=2.5), 429, "rate_limit_exceeded"),
        (ConflictError("taken"), 409, "conflict"),
        (RefusedError("no"), 503, "refused"),
        (BrokerUnavailableError("away"), 503, "broker_unavailable"),
    ],
    ids=lambda value: str(value) if isinstance(value, str | int) else type(value).__name__,
)
async def test_what_the_queue_refuses_becomes_a_status(
    http: httpx.AsyncClient, backend: FakeBackend, refusal: RefusedError, status: int, code: str
) -> None:
    backend.refusal = refusal

    response = await http.post(CHAT, json={**CHAT_BODY, "stream": True})

    assert response.status_code == status
    assert error_of(response)["code"] == code


async def test_retry_after_is_rounded_up_when_the_queue_names_a_time(
    http: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.refusal = QuotaError("slow down", retry_after_s=2.1)

    response = await http.post(CHAT, json=CHAT_BODY)

    assert response.headers["retry-after"] == "3"


async def test_no_choice_stays_behind_when_the_second_is_refused(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.refusal, backend.refuse_after = QueueFullError("full"), 1

    response = await http.post(CHAT, json={**CHAT_BODY, "n": 3})

    assert response.status_code == 503
    assert list(backend.abandoned) == [backend.requests[0].id]


async def test_a_model_without_a_worker_is_503_after_the_grace(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.picture = fleet(daemons=[], seen_ago_ms=61_000)

    response = await http.post(CHAT, json=CHAT_BODY)

    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert error_of(response)["code"] == "no_worker"


@pytest.mark.parametrize(
    "picture",
    [fleet(daemons=[], seen_ago_ms=59_000), fleet(daemons=[worker(phase="starting")], seen_ago_ms=90_000)],
    ids=["within the grace", "a worker is loading"],
)
async def test_a_model_without_a_ready_worker_still_queues(
    http: httpx.AsyncClient, backend: FakeBackend, picture: Fleet
) -> None:
    backend.picture = picture

    response = await http.post(CHAT, json=CHAT_BODY)

    assert response.status_code == 200


@pytest.mark.parametrize("header", ["0", "-1", "soon", "1.5", "9" * 30, ""])
async def test_a_wrong_deadline_header_is_400(http: httpx.AsyncClient, header: str) -> None:
    response = await http.post(CHAT, json=CHAT_BODY, headers={"x-mtplx-timeout-ms": header})

    assert response.status_code == 400
    assert error_of(response)["param"] == "x-mtplx-timeout-ms"


async def test_the_deadline_header_reaches_the_queue(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    await http.post(CHAT, json=CHAT_BODY, headers={"x-mtplx-timeout-ms": "1500"})

    assert backend.submitted[0][3] == 1500


async def test_a_deadline_before_the_first_token_is_504(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script = lambda _: Script(text="", reason="deadline")

    response = await http.post(CHAT, json=CHAT_BODY)

    assert response.status_code == 504
    assert error_of(response)["code"] == "deadline_exceeded"
    assert response.headers["x-should-retry"] == "false"


async def test_a_model_may_be_asked_for_by_its_identity(http: httpx.AsyncClient) -> None:
    response = await http.post(CHAT, json={**CHAT_BODY, "model": IDENTITY})

    assert response.status_code == 200


async def test_an_idempotency_key_that_is_too_long_is_refused_by_name(http: httpx.AsyncClient) -> None:
    response = await http.post(CHAT, json=CHAT_BODY, headers={"Idempotency-Key": "k" * 256})

    assert response.status_code == 400
    assert error_of(response)["param"] == "Idempotency-Key"


async def test_requests_are_503_at_once_while_the_reply_subscription_is_down(
    http: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.is_connected = False

    response = await http.post(CHAT, json=CHAT_BODY)

    assert response.status_code == 503
    assert error_of(response)["code"] == "broker_unavailable"
    assert backend.submitted == []
