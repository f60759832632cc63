"""The Idempotency-Key header: one request however often it is asked for. Engine: scripted, in a process of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from api.calls.client import QueueOptions, TextClient
from broker import keys
from broker.client.client import Client
from harness.scripted import ask
from harness.stack import Stack
from harness.stack import wait_until as wait_for
from harness.wait import wait_until
from tests.offline.test_text_client import text_of
from workers.scripted_lane import NAME

PATH = "/v1/completions"


@pytest.fixture
def http(offline_stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=offline_stack.url, timeout=60) as http:
        yield http


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": prompt, "max_tokens": 12, "temperature": 1.0} | fields


def named(key: str) -> dict[str, str]:
    return {"Idempotency-Key": key}


async def status_of(client: Client, call_id: str) -> str | None:
    return (await client.read(call_id)).status


def test_same_key_and_body_give_the_same_answer_once(http: httpx.Client) -> None:
    first = http.post(PATH, json=body("same"), headers=named("key-1"))
    again = http.post(PATH, json=body("same"), headers=named("key-1"))

    assert first.headers["x-request-id"] == again.headers["x-request-id"]
    assert first.json() | {"created": 0} == again.json() | {"created": 0}
    assert first.json()["choices"][0]["text"] == text_of(ask("same", 12).expected)


def test_retry_while_it_runs_streams_from_the_first_token(http: httpx.Client) -> None:
    asked = body("runs", max_tokens=400, stream=True)
    with http.stream("POST", PATH, json=asked, headers=named("key-2")) as first:
        lines = first.iter_lines()
        seen = next(lines)
        again = http.post(PATH, json=asked | {"stream": False}, headers=named("key-2"))
        chunks = [json.loads(line[6:]) for line in [seen, *lines] if line.startswith("data: {")]

    assert again.json()["choices"][0]["text"] == text_of(ask("runs", 400).expected)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text_of(ask("runs", 400).expected)


def test_every_choice_of_a_call_is_found_again(http: httpx.Client) -> None:
    first = http.post(PATH, json=body("three", n=3), headers=named("key-3"))
    again = http.post(PATH, json=body("three", n=3), headers=named("key-3"))

    assert first.json()["choices"] == again.json()["choices"]
    assert len(again.json()["choices"]) == 3


def test_key_of_another_body_is_a_conflict(http: httpx.Client) -> None:
    http.post(PATH, json=body("mine"), headers=named("key-4"))

    other = http.post(PATH, json=body("yours"), headers=named("key-4"))

    assert other.status_code == 409
    assert other.json()["error"]["code"] == "conflict"


async def test_call_that_names_no_length_is_found_again_when_a_wider_worker_has_come() -> None:
    stack = Stack(workers=1)
    stack.arguments["worker"] = ("--engine", "scripted", "--max-context-tokens", "64")
    stack.arguments["api"] = ("--registry-age-s", "0.1")
    with stack, httpx.Client(base_url=stack.url, timeout=60) as http:
        first = [ask_by_http(http), await ask_directly(stack)]
        stack.arguments["worker"] = ("--engine", "scripted", "--max-context-tokens", "128")
        stack.start_one("worker-1")
        wait_for(lambda: widest(http) == 128, "the API sees the wider worker")
        again = [ask_by_http(http), await ask_directly(stack)]

    assert [each["choices"][0]["finish_reason"] for each in first] == ["length", "length"]
    assert again == first


def ask_by_http(http: httpx.Client) -> dict[str, Any]:
    answer = http.post(PATH, json={"model": NAME, "prompt": "at length"}, headers=named("key-8"))
    return dict(answer.json() | {"created": 0})


async def ask_directly(stack: Stack) -> dict[str, Any]:
    """The same from a program that has just started."""
    async with await TextClient.open(stack.redis_url) as text:
        call = await text.complete("at length", model=NAME, terms=QueueOptions(idempotency_key="key-9"))
        return dict(json.loads((await call.whole()).body) | {"created": 0})


def widest(http: httpx.Client) -> int:
    return int(http.get(f"/v1/models/{NAME}").json()["max_context_tokens"])


def test_calls_without_a_key_are_apart(http: httpx.Client) -> None:
    ids = {http.post(PATH, json=body("plain")).headers["x-request-id"] for _ in range(2)}

    assert len(ids) == 2


@pytest.mark.parametrize("key", ["", "x" * 256])
def test_key_that_is_none_is_refused(http: httpx.Client, key: str) -> None:
    refused = http.post(PATH, json=body("x"), headers=named(key))

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "Idempotency-Key"


async def test_request_outlives_its_listener_and_ends_when_nobody_comes(short_detach: Stack) -> None:
    client = await Client.open(short_detach.redis_url)
    async with httpx.AsyncClient(base_url=short_detach.url, timeout=60) as http:
        asked = body("left alone", max_tokens=2000, stream=True)
        async with http.stream("POST", PATH, json=asked, headers=named("key-5")) as stream:
            call_id = stream.headers["x-request-id"]
            await anext(stream.aiter_lines())

    async def has_ended() -> bool:
        return await status_of(client, call_id) == "cancelled"

    with short_detach.engines_held():
        await asyncio.sleep(0.3)
        soon_after = await status_of(client, call_id)
        await wait_until(has_ended, "the request was cancelled")
    cause = await client.commands.hget(keys.state(call_id), "cancel")
    await client.close()

    assert soon_after in ("waiting", "running")
    assert cause == b"listener"


async def test_request_goes_on_for_whoever_asks_again_in_time(short_detach: Stack) -> None:
    asked = body("comes back", max_tokens=2000, stream=True)
    async with httpx.AsyncClient(base_url=short_detach.url, timeout=60) as http:
        async with http.stream("POST", PATH, json=asked, headers=named("key-6")) as stream:
            await anext(stream.aiter_lines())

        again = await http.post(PATH, json=asked | {"stream": False}, headers=named("key-6"))

    assert again.json()["choices"][0]["text"] == text_of(ask("comes back", 2000).expected)


async def test_key_of_a_cancelled_request_is_free_again(short_detach: Stack) -> None:
    client = await Client.open(short_detach.redis_url)
    asked = body("second chance", max_tokens=1500)
    async with httpx.AsyncClient(base_url=short_detach.url, timeout=60) as http:
        async with http.stream("POST", PATH, json=asked | {"stream": True}, headers=named("key-7")) as stream:
            first_id = stream.headers["x-request-id"]
            await client.cancel(first_id, "operator")

        again = await http.post(PATH, json=asked, headers=named("key-7"))
    await client.close()

    assert again.headers["x-request-id"] != first_id
    assert again.json()["choices"][0]["text"] == text_of(ask("second chance", 1500).expected)


@pytest.fixture(scope="module")
def short_detach() -> Iterator[Stack]:
    """A stack that gives detached requests some seconds, with an engine that takes longer for 2000 tokens."""
    stack = Stack(workers=1)
    stack.arguments["worker"] = ("--engine", "scripted", "--script-step-s", "0.003")
    stack.arguments["api"] = ("--detach-s", "5")
    with stack:
        yield stack
