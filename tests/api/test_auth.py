"""API keys, and what may be served without. Engine: none (the queue is a fake)."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from openai import AuthenticationError

from api.app import create_app
from api.auth import KeyRing, hash_key, load_keys, new_key
from api.config import is_loopback
from api.errors import ApiConfigError, InvalidKeyError
from tests.api.conftest import api_config, http_client, openai_client, serving
from tests.api.fake import NAME, FakeBackend

KEY = "mtplx-secret"
HASH = hash_key(KEY)


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(f'[keys.alice]\nhash = "{HASH}"\n[keys.bob]\nhash = "{hash_key("other")}"\n')
    return path


def test_ring_names_the_payer_of_a_known_key(keys_file: Path) -> None:
    assert load_keys(keys_file).payer(f"Bearer {KEY}").key_id == "alice"


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", f"Basic {KEY}", "Bearer wrong", f"Bearer {HASH}"])
def test_ring_refuses_everybody_else(keys_file: Path, header: str | None) -> None:
    with pytest.raises(InvalidKeyError):
        load_keys(keys_file).payer(header)


def test_open_ring_lets_everybody_in() -> None:
    assert KeyRing(None).payer(None).key_id == ""


def test_new_keys_differ_and_are_not_stored_as_they_are() -> None:
    first, second = new_key(), new_key()

    assert first != second
    assert first not in hash_key(first)


@pytest.mark.parametrize(
    "text",
    ["", "keys = 3", "[keys]", "[keys.a]", '[keys.a]\nhash = "x"', f'[keys."a b"]\nhash = "{HASH}"', "{"]
    + [
        f'[keys.a]\nhash = "{HASH}"\n{line}'
        for line in ("rows = 3", "tokens_per_minute = -1", "tokens_per_minute = true")
    ],
)
def test_keys_file_with_an_error_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)

    with pytest.raises(ApiConfigError, match=r"keys\.toml.*allowed"):
        load_keys(path)


def test_keys_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ApiConfigError, match="keys file"):
        load_keys(tmp_path / "none.toml")


async def test_server_with_keys_answers_only_who_has_one(keys_file: Path, backend: FakeBackend) -> None:
    async with serving(backend, api_config(keys_file=keys_file)) as url:
        async with openai_client(url, api_key=KEY) as client:
            answer = await client.completions.create(model=NAME, prompt="x")
        async with openai_client(url, api_key="wrong") as client:
            with pytest.raises(AuthenticationError):
                await client.models.list()

    assert answer.choices[0].text == "Hello, world!"
    assert backend.submitted[0][1].key_id == "alice"


@pytest.mark.parametrize("path", ["/health", "/metrics", "/", "/docs", "/openapi.json"])
async def test_server_with_keys_shows_its_state_to_everybody(keys_file: Path, backend: FakeBackend, path: str) -> None:
    async with serving(backend, api_config(keys_file=keys_file)) as url, http_client(url) as http:
        response = await http.get(path)

    assert response.status_code == 200


async def test_key_limits_reach_the_client_as_headers(tmp_path: Path, backend: FakeBackend) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[keys.alice]\nhash = "{HASH}"\nrequests_per_minute = 60\ntokens_per_minute = 1000\n')

    async with serving(backend, api_config(keys_file=path)) as url, http_client(url) as http:
        headers = {"authorization": f"Bearer {KEY}"}
        response = await http.post("/v1/completions", json={"model": NAME, "prompt": "x"}, headers=headers)

    found = {name: value for name, value in response.headers.items() if name.startswith("x-ratelimit-")}
    assert found == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1.000s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "900",
        "x-ratelimit-reset-tokens": "6.000s",
    }


async def test_unauthorised_calls_are_told_how(keys_file: Path, backend: FakeBackend) -> None:
    async with serving(backend, api_config(keys_file=keys_file)) as url, http_client(url) as http:
        response: httpx.Response = await http.get("/v1/models")

    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "studio.local"])
def test_serving_beyond_loopback_without_keys_is_refused(host: str) -> None:
    with pytest.raises(ApiConfigError, match="without keys"):
        create_app(api_config(host=host))


def test_serving_beyond_loopback_without_keys_may_be_said_explicitly() -> None:
    create_app(api_config(host="0.0.0.0", allow_open=True))


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:8000", ""])
@pytest.mark.asyncio(loop_scope="session")
async def test_server_on_loopback_answers_to_loopback_names(http: httpx.AsyncClient, host: str) -> None:
    response = await http.get("/v1/models", headers={"host": host})

    assert response.status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "192.168.0.1", "[", "%00"])
@pytest.mark.asyncio(loop_scope="session")
async def test_server_on_loopback_without_keys_refuses_other_names(http: httpx.AsyncClient, host: str) -> None:
    response = await http.get("/v1/models", headers={"host": host})

    assert response.status_code == 403
    assert response.json()["error"]["code"] == "host_not_allowed"


async def test_server_with_keys_answers_to_any_name(keys_file: Path, backend: FakeBackend) -> None:
    async with serving(backend, api_config(keys_file=keys_file)) as url, http_client(url) as http:
        headers = {"host": "studio.example", "authorization": f"Bearer {KEY}"}
        response = await http.get("/v1/models", headers=headers)

    assert response.status_code == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("a", False)],
)
def test_loopback_is_known_by_its_address(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 70000),
        ("keep_alive_s", 16),
        ("keep_alive_s", 0),
        ("body_limit_bytes", 5),
        ("default_timeout_s", 0),
        ("default_timeout_s", 10**9),
        ("lane_grace_s", -1),
    ],
)
def test_config_names_key_value_and_what_is_allowed(field: str, value: float) -> None:
    with pytest.raises(ApiConfigError, match=rf"{field} = .*allowed"):
        api_config(**{field: value})


def test_key_that_is_added_to_the_file_may_ask_at_once_and_one_taken_away_may_not(keys_file: Path) -> None:
    ring = load_keys(keys_file)

    keys_file.write_text(f'[keys.bob]\nhash = "{hash_key("another")}"\n')

    assert ring.payer("Bearer another").key_id == "bob"
    with pytest.raises(InvalidKeyError):
        ring.payer(f"Bearer {KEY}")


@pytest.mark.parametrize("content", ["[keys.bob", "", None], ids=["broken", "empty", "gone"])
def test_keys_stay_as_they_were_when_the_file_cannot_be_read(keys_file: Path, content: str | None) -> None:
    ring = load_keys(keys_file)
    keys_file.unlink()
    if content is not None:
        keys_file.write_text(content)

    assert ring.payer(f"Bearer {KEY}").key_id == "alice"
    assert not ring.is_open
