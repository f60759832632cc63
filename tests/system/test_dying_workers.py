"""Workers that die without a word, found out by their silence. Real processes; engine: scripted."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from broker import keys
from broker.client.client import Client
from harness.stack import Stack, wait_until
from tests.system.breaking import Streams, state_of, until, until_async

LEASE_S = "2"
POISON = "poison!"


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Three workers; a certain prompt kills whoever decodes it, and prefill takes its time."""
    stack = Stack(workers=3)
    script = ("--engine", "scripted", "--script-step-s", "0.01", "--script-prefill-token-s", "0.002")
    geometry = ("--max-context-tokens", "4096", "--prefill-chunk-tokens", "4096")
    stack.arguments["worker"] = (*script, "--script-crash-text", POISON, *geometry, "--lease-s", LEASE_S)
    stack.arguments["former"] = ("--lease-s", LEASE_S)
    stack.arguments["api"] = ("--registry-age-s", "0.1")
    with stack:
        yield stack


async def test_request_is_answered_once_when_its_worker_is_killed_before_the_first_token(
    stack: Stack, streams: Streams, client: Client
) -> None:
    workers = [name for name in stack.processes if name.startswith("worker")]
    for name in workers:
        stack.signal(name, signal.SIGSTOP)
    [told] = streams.start("claimed and not begun", length=30)
    await until(lambda: bool(told.request_id))

    async def is_claimed() -> bool:
        return bool(await state_of(client, told, "owner"))

    await until_async(is_claimed, "a worker owns the request")
    stack.kill(stack.name_of(await state_of(client, told, "owner")))
    for name in workers:
        if stack.processes[name].poll() is None:
            stack.signal(name, signal.SIGCONT)
    await streams.end()

    assert told.is_right, str(told)
    assert await state_of(client, told, "attempt") == "2"
    stack.restart_dead()
    wait_until(lambda: stack.accepting_workers() == 3, "three workers accept")


async def test_poison_among_good_requests_is_the_one_that_is_given_up(
    stack: Stack, streams: Streams, client: Client
) -> None:
    good = streams.start(*(f"good {i}" for i in range(7)), length=300)
    [bad] = streams.start(f"some {POISON}", length=20)

    with stack.supervised():
        await streams.end()
        wait_until(lambda: stack.accepting_workers() == 3, "three workers accept")

    assert [str(told) for told in good if not told.is_right] == []
    assert "crashed_workers" in bad.end
    letters: Any = await client.commands.xrange(keys.DEAD_LETTERS)
    assert [fields[b"id"].decode() for _, fields in letters] == [bad.request_id]


async def test_worker_in_a_prefill_longer_than_its_lease_keeps_its_request_and_its_health(
    streams: Streams, http: httpx.AsyncClient, client: Client
) -> None:
    [told] = streams.start("p" * 2500, length=5)
    words = set()
    while told.end != "done":
        words.add((await http.get("/health")).json()["status"])
        assert told.end in ("nothing", "length", "done"), str(told)

    assert words == {"healthy"}
    assert told.is_right, str(told)
    assert await state_of(client, told, "attempt") == "1"
