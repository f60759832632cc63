"""What a client is told of the wait that the former foresees. Engine: none (a fake queue)."""

from __future__ import annotations

import json

import httpx
import pytest

from broker.errors import QueueFullError
from broker.registry import DaemonRecord
from tests.api.fake import IDENTITY, NAME, FakeBackend, fleet, worker

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT = "/v1/chat/completions"
BODY = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}]}


def former(snapshot: str, *, working: str = "1") -> DaemonRecord:
    return DaemonRecord(f"former-{working}", "former", 1, {"working": working, "snapshot": snapshot})


def foreseen(interactive_ms: float) -> str:
    return json.dumps({"cohorts": 3, "waits_ms": {f"{IDENTITY}:balanced": {"interactive": interactive_ms}}})


async def test_full_queue_names_the_wait_that_the_working_former_foresees(
    http: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.picture = fleet(daemons=[worker(), former(foreseen(99_000), working="0"), former(foreseen(6400))])
    backend.refusal = QueueFullError("full")

    response = await http.post(CHAT, json=BODY)

    assert (response.status_code, response.headers["retry-after"]) == (503, "7")


async def test_request_that_would_wait_past_its_deadline_is_refused_before_it_is_queued(
    http: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.picture = fleet(daemons=[worker(), former(foreseen(6400))])

    refused = await http.post(CHAT, json=BODY, headers={"x-mtplx-timeout-ms": "4000"})
    taken = await http.post(CHAT, json=BODY, headers={"x-mtplx-timeout-ms": "5000"})

    assert (refused.status_code, refused.headers["retry-after"]) == (503, "7")
    assert taken.status_code == 200
    assert len(backend.submitted) == 1


@pytest.mark.parametrize("snapshot", ["", "[]", '{"waits_ms": 3}', '{"waits_ms": {"other:balanced": {}}}'])
async def test_wait_that_nobody_foresees_stops_nobody(
    http: httpx.AsyncClient, backend: FakeBackend, snapshot: str
) -> None:
    backend.picture = fleet(daemons=[worker(), former(snapshot)])

    response = await http.post(CHAT, json=BODY, headers={"x-mtplx-timeout-ms": "1"})

    assert response.status_code == 200
