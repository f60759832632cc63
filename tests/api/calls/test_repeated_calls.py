"""A call asked again under its Idempotency-Key while the fleet, or the day, has become another. Engine: none (a fake
queue that knows keys as ACCEPT does)."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from msgspec import structs

from api.fleet.backend import Fleet
from broker.errors import ConflictError
from broker.registry import DaemonRecord
from broker.scripts import Accepted, Idempotency, Quota, Submission, digest
from broker.wire import Request, Ticket
from tests.api.conftest import http_client, serving
from tests.api.fake import CONTEXT, IDENTITY, NAME, TEMPLATE, FakeBackend, FakeHandle, card, fleet, worker

CHAT = "/v1/chat/completions"
BODY = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}]}
OTHER = f"{NAME}@ba9876543210"


class KeyedBackend(FakeBackend):
    """Accepts what is asked under one key once."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[str, tuple[str, FakeHandle]] = {}

    async def submit(
        self,
        request: Request,
        ticket: Ticket,
        *,
        seed: int | None,
        timeout_ms: int,
        retain_ms: int,
        quota: Quota,
        idempotency: Idempotency | None = None,
    ) -> FakeHandle:
        assert idempotency is not None
        asked = digest(Submission(request, ticket, seed, idempotency=idempotency))
        if (known := self.known.get(idempotency.digest)) is not None:
            if known[0] != asked:
                raise ConflictError("another request has this key")
            return known[1]
        accepted = Accepted(1, True, request.id)
        handle = FakeHandle(self, request, self.script(request), accepted)
        self.known[idempotency.digest] = (asked, handle)
        self.submitted.append((request, ticket, seed, timeout_ms))
        return handle


def wide_worker(tokens: int, *, model: str = IDENTITY) -> DaemonRecord:
    narrow = worker(name=f"worker-{tokens}")
    assert narrow.lane is not None
    return replace(narrow, lane=structs.replace(narrow.lane, model=model, max_context_tokens=tokens))


def two_identities(served_last: str) -> Fleet:
    cards = [card(), structs.replace(card(identity=OTHER), tokenizer="t2", eos_token_ids=(1,))]
    seen_ms = {IDENTITY: 1_000_000, OTHER: 1_000_000} | {served_last: 1_000_001}
    return fleet(cards=cards, daemons=[worker(), wide_worker(CONTEXT, model=OTHER)], last_seen_ms=seen_ms)


def dated(day: str) -> dict[str, bytes]:
    files = FakeBackend().files
    config = json.loads(files["tokenizer_config.json"]) | {"chat_template": f"It is {day}. {TEMPLATE}"}
    return files | {"tokenizer_config.json": json.dumps(config).encode()}


@pytest.fixture
def backend() -> KeyedBackend:
    return KeyedBackend()


async def ask(http: httpx.AsyncClient, **changes: Any) -> httpx.Response:
    return await http.post(CHAT, json=BODY | changes, headers={"Idempotency-Key": "key-1"})


async def test_call_without_max_tokens_is_known_again_whatever_lanes_there_are(backend: KeyedBackend) -> None:
    async with serving(backend) as url, http_client(url) as http:
        first = await ask(http)
        backend.picture = fleet(daemons=[wide_worker(2 * CONTEXT)])
        again = await ask(http)

    assert again.headers["x-request-id"] == first.headers["x-request-id"]
    assert len(backend.submitted) == 1


@pytest.mark.parametrize("served_last", [IDENTITY, OTHER])
async def test_call_is_known_again_when_its_models_name_stands_for_another_identity(
    backend: KeyedBackend, served_last: str
) -> None:
    async with serving(backend) as url, http_client(url) as http:
        backend.picture = two_identities(served_last)
        first = await ask(http)
        backend.picture = two_identities(OTHER if served_last == IDENTITY else IDENTITY)
        again = await ask(http)

    assert again.json() | {"created": 0} == first.json() | {"created": 0}
    assert first.json()["system_fingerprint"] == served_last
    assert len(backend.submitted) == 1


async def test_call_is_known_again_when_the_model_it_went_to_is_gone(backend: KeyedBackend) -> None:
    async with serving(backend) as url, http_client(url) as http:
        first = await ask(http)
        backend.picture = replace(two_identities(OTHER), daemons=[wide_worker(CONTEXT, model=OTHER)])
        again = await ask(http)

    assert again.headers["x-request-id"] == first.headers["x-request-id"]


async def test_call_is_known_again_on_another_day_by_a_template_that_names_it(backend: KeyedBackend) -> None:
    backend.files = dated("Monday")
    async with serving(backend) as url, http_client(url) as http:
        first = await ask(http)
    backend.files = dated("Tuesday")
    async with serving(backend) as url, http_client(url) as http:
        again = await ask(http)

    assert again.headers["x-request-id"] == first.headers["x-request-id"]


async def test_another_body_is_a_conflict_under_every_identity_of_the_name(backend: KeyedBackend) -> None:
    async with serving(backend) as url, http_client(url) as http:
        backend.picture = two_identities(IDENTITY)
        await ask(http)
        other = await ask(http, messages=[{"role": "user", "content": "Hi!"}])

    assert (other.status_code, other.json()["error"]["code"]) == (409, "conflict")
    assert len(backend.submitted) == 1
