"""The counters of `/metrics` against what a client sent and saw, over the whole path. Engine: scripted."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from harness.stack import Stack, wait_until

EACH = 6
PROMPT = "Count me"


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack(workers=2)
    stack.arguments["worker"] = ("--engine", "scripted", "--script-step-s", "0.005", "--decode-batch-max", "4")
    stack.arguments["api"] = ("--registry-age-s", "0.1")
    with stack:
        yield stack


def body(**more: Any) -> dict[str, Any]:
    return {"model": "scripted", "prompt": PROMPT, "max_tokens": 12, **more}


async def whole(http: httpx.AsyncClient, **more: Any) -> Counter[str]:
    """An answer in one piece: its ends, and the tokens it was charged for."""
    headers = more.pop("headers", {})
    response = await http.post("/v1/completions", json=body(**more), headers=headers)
    if response.status_code != 200:
        waited_in_vain = int(response.status_code == 504)
        return Counter({f"http {response.status_code}": 1, "deadline": waited_in_vain})
    answer = response.json()
    ends = Counter(choice["finish_reason"] for choice in answer["choices"])
    return ends + Counter(tokens=answer["usage"]["completion_tokens"], prompt=answer["usage"]["prompt_tokens"])


async def streamed(http: httpx.AsyncClient) -> Counter[str]:
    asked = body(stream=True, stream_options={"include_usage": True})
    ends: Counter[str] = Counter()
    async with http.stream("POST", "/v1/completions", json=asked) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            ends.update(choice["finish_reason"] for choice in chunk["choices"] if choice["finish_reason"])
            if chunk.get("usage"):
                ends["tokens"] += chunk["usage"]["completion_tokens"]
                ends["prompt"] += chunk["usage"]["prompt_tokens"]
    return ends


async def left(http: httpx.AsyncClient) -> Counter[str]:
    """A client that goes away after the first bytes."""
    async with http.stream("POST", "/v1/completions", json=body(stream=True, max_tokens=1500)) as response:
        await anext(response.aiter_bytes())
    return Counter(left=1)


async def everything(url: str) -> Counter[str]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        calls = [
            each
            for _ in range(EACH)
            for each in (
                whole(http),
                whole(http, n=3, seed=1),
                whole(http, max_tokens=1),
                whole(http, max_tokens=0),
                whole(http, model="nobody"),
                whole(http, max_tokens=1500, headers={"x-mtplx-timeout-ms": "200"}),
                streamed(http),
                left(http),
            )
        ]
        return sum(await asyncio.gather(*calls), Counter())


def sums(url: str) -> Mapping[str, float]:
    """All counters by name and the labels that matter here."""
    found: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            label = sample.labels.get("end") or sample.labels.get("status") or ""
            found[f"{sample.name} {label}".strip()] += sample.value
    return found


def test_counters_equal_what_was_sent_whatever_ended_how(stack: Stack) -> None:
    seen = asyncio.run(everything(stack.url))
    wait_until(lambda: sums(stack.url)["mtplx_queue_requests"] == 0, "all have ended", on_timeout=stack.logs)
    found = sums(stack.url)

    accepted = sum(seen[end] for end in ("length", "stop", "deadline", "left"))
    ended = {name.split()[1]: count for name, count in found.items() if name.startswith("mtplx_requests_ended_total ")}
    assert ended == {end: seen[end] for end in ("length", "stop", "deadline", "left") if seen[end]}
    assert found["mtplx_requests_accepted_total"] == accepted
    assert found["mtplx_requests_open"] == 0
    fleet = sum(count for name, count in found.items() if name.startswith("mtplx_fleet_requests_ended_total"))
    assert fleet == accepted
    assert found["mtplx_completion_tokens_total"] >= seen["tokens"]
    refused = {name: count for name, count in seen.items() if name.startswith("http ")}
    assert refused["http 400"] == refused["http 404"] == EACH
    for name, count in refused.items():
        assert found[f"mtplx_http_responses_total {name.removeprefix('http ')}"] == count
