"""API keys and their limits over the whole path, with a real Redis behind them. Engine: scripted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.auth import hash_key, new_key
from harness.scripted import SCRIPT
from harness.stack import Stack
from harness.wait import PATIENCE_S
from mtplx_core.engine import Row
from mtplx_core.engines.scripted import scripted_completion
from workers.scripted_lane import encode_text

REQUESTS, TOKENS = 4, 600
STOPS = scripted_completion(Row("row", encode_text("Hello"), 3), SCRIPT)
"""What the engine says first; any of them ends the answer at once."""
ALICE, BOB, CAROL = new_key(), new_key(), new_key()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    path: Path = tmp_path_factory.mktemp("keys") / "keys.toml"
    limits = {
        ALICE: f"requests_per_minute = {REQUESTS}",
        BOB: f"tokens_per_minute = {TOKENS}",
        CAROL: f"tokens_per_minute = {TOKENS}",
    }
    tables = [
        f'[keys.k{number}]\nhash = "{hash_key(key)}"\n{more}\n' for number, (key, more) in enumerate(limits.items())
    ]
    path.write_text("\n".join(tables))
    stack = Stack()
    stack.arguments["worker"] = ("--engine", "scripted")
    stack.arguments["api"] = ("--keys-file", str(path))
    stack.api_key = CAROL
    with stack:
        yield stack


def complete(stack: Stack, key: str, **more: Any) -> httpx.Response:
    body = {"model": "scripted", "prompt": "Hello", "max_tokens": 5, **more}
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{stack.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)


def test_key_is_refused_with_a_wait_once_its_requests_are_used_up(stack: Stack) -> None:
    answers = [complete(stack, ALICE) for _ in range(REQUESTS)]

    refused = complete(stack, ALICE)

    left = [int(answer.headers["x-ratelimit-remaining-requests"]) for answer in answers]
    assert [answer.status_code for answer in answers] == [200] * REQUESTS
    assert left == sorted(left, reverse=True)
    assert left[-1] <= 1  # some trickles back in the meantime
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 60 / REQUESTS
    assert complete(stack, CAROL).status_code == 200


def test_key_gets_back_the_tokens_that_its_answer_did_not_take(stack: Stack) -> None:
    stopped = complete(stack, BOB, max_tokens=TOKENS - 50, stop_token_ids=list(STOPS))
    after = complete(stack, BOB, max_tokens=TOKENS // 2)

    taken = TOKENS - int(stopped.headers["x-ratelimit-remaining-tokens"])
    assert stopped.json()["choices"][0]["finish_reason"] == "stop"
    assert taken >= TOKENS - 50
    assert after.status_code == 200


def test_request_that_asks_for_more_than_its_key_ever_has_is_refused(stack: Stack) -> None:
    refused = complete(stack, CAROL, max_tokens=TOKENS + 1)

    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
