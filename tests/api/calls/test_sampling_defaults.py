"""What a request leaves out is what the model's authors say; and `min_tokens`. Engine: none (the queue is a fake)."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from msgspec import structs

from broker.wire import Sampling, SamplingDefaults
from tests.api.fake import CONTEXT, NAME, FakeBackend, Script, card, encode, fleet

pytestmark = pytest.mark.asyncio(loop_scope="session")

SAID = SamplingDefaults(0.6, 0.95, 20, 0.05, 1.05, 64)
MEANT = Sampling(0.6, 0.95, 20, 0.05, 1.05)
NULLS = dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "min_tokens"))
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
CALLS = pytest.mark.parametrize(
    ("path", "body"), [("completions", {"prompt": "Hi"}), ("chat/completions", CHAT)], ids=["completion", "chat"]
)


@pytest.fixture
def says(backend: FakeBackend) -> None:
    """The model's authors say everything."""
    backend.picture = fleet(cards=[structs.replace(card(), defaults=SAID)])


async def post(http: httpx.AsyncClient, path: str, **body: Any) -> httpx.Response:
    return await http.post(f"/v1/{path}", json={"model": NAME, **body})


@CALLS
@pytest.mark.parametrize("left_out", [{}, NULLS], ids=["absent", "null"])
@pytest.mark.usefixtures("says")
async def test_fields_left_out_are_as_the_authors_say(
    http: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any], left_out: dict[str, None]
) -> None:
    response = await post(http, path, **body, **left_out)

    assert response.status_code == 200
    [request] = backend.requests
    assert (request.sampling, request.max_tokens, request.min_tokens) == (MEANT, 64, 0)
    assert "x-mtplx-max-tokens" not in response.headers


@CALLS
async def test_fields_left_out_are_neutral_where_the_authors_say_nothing(
    http: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any]
) -> None:
    await post(http, path, **body)

    [request] = backend.requests
    assert request.sampling == Sampling() == Sampling(1.0, 1.0, 0, 0.0, 1.0)
    assert request.max_tokens > CONTEXT / 2


@CALLS
@pytest.mark.usefixtures("says")
async def test_fields_of_the_request_go_before(
    http: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any]
) -> None:
    fields = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "max_tokens": 100}

    await post(http, path, **body, **fields)

    [request] = backend.requests
    assert (request.sampling, request.max_tokens) == (Sampling(0.0), 100)


@pytest.mark.usefixtures("says")
async def test_default_of_max_tokens_never_goes_past_the_context(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    await post(http, "completions", prompt=[5] * (CONTEXT - 10))

    assert [request.max_tokens for request in backend.requests] == [10]


@pytest.mark.usefixtures("says")
async def test_model_tells_its_defaults(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/v1/models")).json()["data"][0]
    single = (await http.get(f"/v1/models/{NAME}")).json()

    assert listed["default_sampling_params"] == single["default_sampling_params"] == structs.asdict(SAID)


async def test_model_tells_what_holds_where_its_authors_say_nothing(http: httpx.AsyncClient) -> None:
    told = (await http.get(f"/v1/models/{NAME}")).json()["default_sampling_params"]

    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert told == {**neutral, "max_tokens": None}


@CALLS
async def test_min_tokens_goes_with_the_request(
    http: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any]
) -> None:
    await post(http, path, **body, min_tokens=8, max_tokens=8, n=2)

    assert [request.min_tokens for request in backend.requests] == [8, 8]


@CALLS
@pytest.mark.parametrize("value", [-1, 9, 1.5, "3", True], ids=repr)
async def test_min_tokens_out_of_bounds_is_refused_by_name(
    http: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any], value: object
) -> None:
    response = await post(http, path, **body, min_tokens=value, max_tokens=8)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "min_tokens"
    assert not backend.requests


async def test_min_tokens_that_the_context_has_no_place_for_is_refused(
    http: httpx.AsyncClient, backend: FakeBackend
) -> None:
    prompts = [[5], [5] * (CONTEXT - 10)]

    response = await post(http, "completions", prompt=prompts[1], min_tokens=11, max_tokens=20)

    assert (response.status_code, response.json()["error"]["param"]) == (400, "min_tokens")
    assert (await post(http, "completions", prompt=prompts[0], min_tokens=11)).status_code == 200


async def test_stop_string_within_min_tokens_stays_in_the_text(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    words = "The quick brown fox. The quick brown dog."
    backend.script = lambda request: Script(words)
    within = len(encode("The quick brown fox. The"))

    response = await post(http, "completions", prompt="Hi", stop=["quick"], min_tokens=within)

    assert response.json()["choices"][0]["text"] == "The quick brown fox. The "
