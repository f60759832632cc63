"""Models, health, metrics, the pages and the description. Engine: none (the queue is a fake)."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

import api
from api.fleet.backend import Fleet
from api.fleet.catalog import Catalog
from api.fleet.health import judge
from broker.errors import BrokerUnavailableError
from broker.registry import Load
from tests.api.conftest import api_config, http_client, serving
from tests.api.fake import CONTEXT, IDENTITY, NAME, FakeBackend, Script, card, fleet, worker

pytestmark = pytest.mark.asyncio(loop_scope="session")

BODY = {"model": NAME, "prompt": "The"}
STATIC = Path(api.__file__).parent / "static"


async def samples(http: httpx.AsyncClient) -> dict[str, float]:
    text = (await http.get("/metrics")).text
    return {
        f"{sample.name}{sorted(sample.labels.values())}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_models_lists_each_name_once(openai: AsyncOpenAI, backend: FakeBackend) -> None:
    older = card(identity="tiny@older")
    backend.picture = Fleet(
        cards={IDENTITY: card(), older.model: older}, daemons=[worker()], last_seen_ms={IDENTITY: 5}
    )

    models = [model async for model in openai.models.list()]

    assert [model.id for model in models] == [NAME]
    assert models[0].model_dump()["identity"] == IDENTITY


async def test_model_tells_its_context_and_profiles(openai: AsyncOpenAI) -> None:
    model = (await openai.models.retrieve(NAME)).model_dump()

    assert model["object"] == "model"
    assert model["max_context_tokens"] == CONTEXT
    assert model["profiles"] == ["balanced"]


async def test_health_shows_lanes_and_queue(http: httpx.AsyncClient) -> None:
    response = await http.get("/health")

    body = response.json()
    assert response.status_code == 200
    assert body["status"] == "healthy"
    assert body["queue"] == {"interactive": 0}
    (lane,) = body["lanes"]
    assert lane["lane"] == f"{IDENTITY}:balanced:ar_batch_b8"
    assert lane["workers"][0]["snapshot"] == {"cycles": 3}


@pytest.mark.parametrize(
    ("picture", "word"),
    [
        pytest.param(fleet(), "healthy", id="a worker accepts"),
        pytest.param(fleet(daemons=[]), "starting", id="nobody yet"),
        pytest.param(fleet(daemons=[worker(phase="starting", is_accepting=False)]), "starting", id="loading"),
        pytest.param(fleet(daemons=[worker(phase="draining", is_accepting=False)]), "draining", id="all leaving"),
    ],
)
async def test_health_word_follows_the_workers(picture: Fleet, word: str) -> None:
    assert judge(picture)[0] == word


async def test_health_is_stalled_when_rows_are_active_and_nothing_moves(backend: FakeBackend) -> None:
    now = [0.0]
    catalog = Catalog(backend, age_s=0, lane_grace_s=60, stall_s=20, clock=lambda: now[0])
    words = []

    for progress, at_s in [(7, 0.0), (7, 4.0), (7, 8.0), (7, 12.0), (8, 16.0)]:
        now[0] = at_s
        backend.picture = fleet(daemons=[worker(progress=progress, active_rows=1)])
        words.append(judge(await catalog.fleet(), catalog.stalled)[0])

    assert words == ["healthy", "healthy", "healthy", "stalled", "healthy"]


async def test_health_is_not_stalled_while_nothing_is_asked_of_a_worker(backend: FakeBackend) -> None:
    now = [0.0]
    catalog = Catalog(backend, age_s=0, lane_grace_s=60, stall_s=20, clock=lambda: now[0])

    for at_s in range(0, 60, 4):
        now[0] = at_s
        await catalog.fleet()

    assert catalog.stalled == frozenset()


async def test_health_is_503_and_keeps_the_last_picture_while_redis_is_away(
    http: httpx.AsyncClient, backend: FakeBackend
) -> None:
    await http.get("/health")
    backend.fleet_error = BrokerUnavailableError("away")

    response = await http.get("/health")

    assert response.status_code == 503
    assert response.json()["status"] == "stalled"
    assert response.json()["reason"] == "away"
    assert len(response.json()["lanes"]) == 1


async def test_health_is_503_while_the_reply_subscription_is_down(
    http: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.is_connected = False

    response = await http.get("/health")

    assert (response.status_code, response.json()["status"]) == (503, "stalled")


async def test_models_are_503_while_redis_is_away(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.fleet_error = BrokerUnavailableError("away")

    response = await http.get("/v1/models")

    assert response.status_code == 503
    assert response.json()["error"]["code"] == "broker_unavailable"


async def test_metrics_add_up_whatever_ended_how(backend: FakeBackend) -> None:
    async with serving(backend, api_config()) as url, http_client(url) as http:
        await http.post("/v1/completions", json=BODY)
        await http.post("/v1/completions", json={**BODY, "max_tokens": 1, "n": 2})
        backend.script = lambda _: Script(hangs=True)
        with pytest.raises(httpx.ReadTimeout):
            await http.post("/v1/completions", json=BODY, timeout=0.3)
        await http.post("/v1/completions", json={})
        found = await samples(http)

    ends = {name: value for name, value in found.items() if name.startswith("mtplx_requests_ended_total")}
    assert ends == {
        "mtplx_requests_ended_total['completions', 'stop']": 1,
        "mtplx_requests_ended_total['completions', 'length']": 2,
        "mtplx_requests_ended_total['completions', 'left']": 1,
    }
    assert found["mtplx_requests_accepted_total['completions']"] == sum(ends.values())
    assert found["mtplx_requests_open['completions']"] == 0
    assert found["mtplx_http_responses_total['/v1/completions', '400']"] == 1
    assert found["mtplx_http_responses_total['/v1/completions', '200']"] == 2


async def test_metrics_show_the_fleet(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.picture = Fleet(
        cards={IDENTITY: card()},
        daemons=[worker()],
        load=Load({"interactive": 7}, {"interactive": 900}, {}),
        ended={"interactive:cancelled:client": 4},
    )
    lane = f"{IDENTITY}:balanced:ar_batch_b8"

    found = await samples(http)

    assert found[f"mtplx_rows['{lane}']"] == 8
    assert found["mtplx_queue_requests['interactive']"] == 7
    assert found["mtplx_fleet_requests_ended_total['cancelled', 'client', 'interactive']"] == 4


async def test_metrics_show_what_daemons_count_themselves(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    snapshot = '{"cycles": 9, "mode": "x", "drafted": [4, 2], "cycle_ms": {"8x1": 1.5}, "is_on": true}'
    backend.picture = fleet(daemons=[worker(snapshot=snapshot)])
    labels = f"'{IDENTITY}:balanced:ar_batch_b8'"

    found = await samples(http)

    assert found[f"ar_batch_cycles['', {labels}, 'worker-1']"] == 9
    assert found[f"ar_batch_drafted['2', {labels}, 'worker-1']"] == 2
    assert found[f"ar_batch_cycle_ms['8x1', {labels}, 'worker-1']"] == 1.5
    assert not any(name.startswith("ar_batch_mode") for name in found)


@pytest.mark.parametrize("snapshot", ["", "[]", "{", "null"])
async def test_health_survives_a_snapshot_it_cannot_read(
    http: httpx.AsyncClient, backend: FakeBackend, snapshot: str
) -> None:
    backend.picture = fleet(daemons=[worker(snapshot=snapshot)])

    response = await http.get("/health")

    assert response.json()["lanes"][0]["workers"][0]["snapshot"] == {}


async def test_metrics_count_unknown_paths_together(http: httpx.AsyncClient) -> None:
    await http.get("/a/b")
    await http.get("/no-such-path")

    found = await samples(http)

    assert found["mtplx_http_responses_total['404', 'other']"] >= 2
    assert not any("no-such-path" in name for name in found)


@pytest.mark.parametrize("path", ["/", "/docs", *(f"/static/{file.name}" for file in STATIC.glob("*.[jcs]*"))])
async def test_pages_are_served_with_their_type(http: httpx.AsyncClient, path: str) -> None:
    response = await http.get(path)

    assert response.status_code == 200
    assert response.headers["content-type"].startswith(("text/", "image/svg"))
    assert "default-src 'self'" in response.headers["content-security-policy"]


async def test_pages_name_no_outside_address() -> None:
    for file in STATIC.iterdir():
        found = re.findall(r"https?://[^\s\"']+", file.read_text())
        assert [address for address in found if "www.w3.org" not in address] == []


@pytest.mark.parametrize("name", ["secret", "..%2fapp.py", "index.html"])
async def test_other_files_are_not_served(http: httpx.AsyncClient, name: str) -> None:
    response = await http.get(f"/static/{name}")

    assert response.status_code == 404
    assert set(response.json()) == {"error"}


async def test_description_covers_every_field_of_the_bodies(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()

    schemas = document["components"]["schemas"]
    assert document["openapi"].startswith("3.1")
    assert "min_p" in schemas["ChatRequest"]["properties"]
    assert schemas["ChatRequest"]["additionalProperties"] is False
    assert set(document["paths"]) >= {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"}


async def test_catalog_answers_with_a_picture_a_little_old_while_the_next_is_taken(backend: FakeBackend) -> None:
    now = [0.0]
    catalog = Catalog(backend, age_s=1, lane_grace_s=60, stall_s=120, clock=lambda: now[0])
    first = await catalog.fleet()
    backend.picture = fleet(daemons=[])
    now[0] = 3.0

    second = await catalog.fleet()
    await catalog.close()

    assert second is first
    assert await catalog.fleet() == backend.picture


async def test_catalog_waits_for_a_picture_when_its_own_is_too_old(backend: FakeBackend) -> None:
    now = [0.0]
    catalog = Catalog(backend, age_s=1, lane_grace_s=60, stall_s=120, clock=lambda: now[0])
    await catalog.fleet()
    backend.fleet_error = BrokerUnavailableError("away")
    now[0] = 10.0

    with pytest.raises(BrokerUnavailableError):
        await catalog.fleet()
