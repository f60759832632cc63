"""Calls of several requests under a key's limits. Engine: none (the queue is a fake)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.auth import hash_key
from api.calls.quota import check_fits, check_rest
from broker.errors import QuotaError
from broker.scripts import Accepted, Quota
from broker.wire import Ticket
from tests.api.conftest import api_config, http_client, serving
from tests.api.fake import IDENTITY, NAME, FakeBackend

KEY = "mtplx-secret"
LIMITS = "requests_per_minute = 60\ntokens_per_minute = 1000"


@asynccontextmanager
async def client(folder: Path, backend: FakeBackend, limits: str = LIMITS) -> AsyncIterator[httpx.AsyncClient]:
    path = folder / "keys.toml"
    path.write_text(f'[keys.alice]\nhash = "{hash_key(KEY)}"\n{limits}\n')
    async with serving(backend, api_config(keys_file=path)) as url, http_client(url) as http:
        http.headers["authorization"] = f"Bearer {KEY}"
        yield http


def body(**more: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": [5] * 10, "max_tokens": 5, **more}


def tickets(count: int) -> list[Ticket]:
    """Requests of 15 tokens each."""
    return [Ticket(f"r{place}", IDENTITY, "balanced", 10, 5, "interactive") for place in range(count)]


@pytest.mark.parametrize(
    ("more", "what"),
    [
        pytest.param({"n": 61, "max_tokens": 1}, "requests", id="choices"),
        pytest.param({"n": 5, "max_tokens": 191}, "tokens", id="tokens"),
        pytest.param({"prompt": ["a"] * 61, "max_tokens": 1}, "requests", id="prompts"),
    ],
)
async def test_call_that_its_key_can_never_have_takes_nothing_and_says_so(
    tmp_path: Path, backend: FakeBackend, more: dict[str, Any], what: str
) -> None:
    async with client(tmp_path, backend) as http:
        response = await http.post("/v1/completions", json=body(**more))

    assert response.status_code == 429
    assert response.headers["x-should-retry"] == "false"
    assert "retry-after" not in response.headers
    assert response.json()["error"]["code"] == "rate_limit_exceeded"
    assert f"more {what} than" in response.json()["error"]["message"]
    assert backend.submitted == []


@pytest.mark.parametrize("more", [{"n": 60}, {"n": 5, "max_tokens": 190}], ids=["requests", "tokens"])
async def test_call_that_takes_all_its_key_has_is_answered(
    tmp_path: Path, backend: FakeBackend, more: dict[str, Any]
) -> None:
    async with client(tmp_path, backend) as http:
        response = await http.post("/v1/completions", json=body(**more))

    assert response.status_code == 200
    assert len(response.json()["choices"]) == more["n"]


@pytest.mark.parametrize("limits", ["", "requests_per_minute = 200"], ids=["no limit", "of requests only"])
async def test_call_is_held_to_no_limit_that_its_key_lacks(tmp_path: Path, backend: FakeBackend, limits: str) -> None:
    async with client(tmp_path, backend, limits) as http:
        backend.left = (199, None)
        response = await http.post("/v1/completions", json=body(n=100, max_tokens=200))

    assert response.status_code == 200


@pytest.mark.parametrize(
    ("left", "wait_s"), [((18, 985), "2"), ((19, 270), "2"), ((18, 10), "18")], ids=["requests", "tokens", "both"]
)
async def test_call_that_does_not_fit_now_takes_one_request_and_says_when_it_will(
    tmp_path: Path, backend: FakeBackend, left: tuple[int, int], wait_s: str
) -> None:
    backend.left = left

    async with client(tmp_path, backend) as http:
        response = await http.post("/v1/completions", json=body(n=20))

    assert response.status_code == 429
    assert response.headers["retry-after"] == wait_s
    assert "x-should-retry" not in response.headers
    assert len(backend.submitted) == 1
    assert list(backend.abandoned) == [backend.requests[0].id]


@pytest.mark.parametrize(
    ("n", "wait_s"), [(1, "3"), (20, "22"), (60, "60")], ids=["one request", "twenty", "all there are"]
)
async def test_call_that_the_queue_refuses_is_told_when_all_of_it_will_fit(
    tmp_path: Path, backend: FakeBackend, n: int, wait_s: str
) -> None:
    backend.refusal = QuotaError("slow down", retry_after_s=2.5)

    async with client(tmp_path, backend) as http:
        response = await http.post("/v1/completions", json=body(n=n))

    assert response.status_code == 429
    assert response.headers["retry-after"] == wait_s


async def test_call_that_the_queue_refuses_for_ever_is_told_so(tmp_path: Path, backend: FakeBackend) -> None:
    backend.refusal = QuotaError("too much")

    async with client(tmp_path, backend) as http:
        response = await http.post("/v1/completions", json=body(n=2))

    assert response.headers["x-should-retry"] == "false"


def test_one_request_is_left_to_the_queue() -> None:
    check_fits(tickets(1), Quota(tokens_per_minute=1))


@pytest.mark.parametrize(
    ("done", "left"),
    [(1, (2, 30)), (2, (1, 15)), (3, (0, 0)), (1, (None, None))],
    ids=["two to go", "one to go", "all done", "accepted before"],
)
def test_rest_of_a_call_goes_on_while_it_fits(done: int, left: tuple[int | None, int | None]) -> None:
    check_rest(tickets(3), done, Quota(60, 1000), Accepted(1, True, "r0", *left))


@pytest.mark.parametrize(("done", "left"), [(1, (1, 30)), (2, (1, 14))], ids=["requests", "tokens"])
def test_rest_of_a_call_is_refused_once_it_does_not_fit(done: int, left: tuple[int, int]) -> None:
    with pytest.raises(QuotaError):
        check_rest(tickets(3), done, Quota(60, 1000), Accepted(1, True, "r0", *left))
