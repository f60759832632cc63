"""A JavaScript program that enqueues requests by what docs/wire.md says. Engine: scripted, in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.scripted import ask
from harness.stack import Stack, free_port
from workers.scripted_lane import NAME, encode_text

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def node() -> str:
    """The program that runs JavaScript, once the example's packages are there."""
    found = shutil.which("node")
    if found is None or not (EXAMPLES / "node_modules").is_dir():
        reason = "no node, or `npm ci --prefix examples` has not been run"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@pytest.fixture(scope="module")
def tcp_url(offline_stack: Stack) -> Iterator[str]:
    """The stack's Redis over TCP, since the npm client knows no unix sockets by URL."""
    port = free_port()
    offline_stack.configure_redis(port=port)
    yield f"redis://127.0.0.1:{port}"
    offline_stack.configure_redis(port=0)


def enqueue(node: str, url: str, prompt: str, max_tokens: int, *more: str) -> dict[str, Any]:
    tokens = ",".join(map(str, encode_text(prompt)))
    command = [node, str(EXAMPLES / "enqueue.mjs"), url, NAME, tokens, str(max_tokens), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_javascript_program_gets_exactly_the_tokens_of_its_request(node: str, tcp_url: str) -> None:
    answer = enqueue(node, tcp_url, "from another language", 40)

    assert (answer["status"], answer["reason"]) == ("finished", "length")
    assert tuple(answer["tokens"]) == ask("from another language", 40).expected


def test_javascript_program_that_asks_again_finds_its_request(node: str, tcp_url: str) -> None:
    first = enqueue(node, tcp_url, "again", 20, "js-twice")

    assert enqueue(node, tcp_url, "again", 20, "js-twice") == first
