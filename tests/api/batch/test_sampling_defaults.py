"""Batches, `mtplx run` and programs take what the model's authors say where a call leaves it out. Engine: none.

No worker is there, only what one has registered: every call waits in the queue, where it can be read.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from openai import OpenAI

from api.calls.client import TextClient
from broker import keys
from broker.client.client import Client
from broker.scripts import Registration
from broker.wire import ModelCard, Request, Sampling, SamplingDefaults, Ticket, decode_request, encode, pack_tokens
from console.supervisor import mtplx_command
from harness import factories as make
from harness.stack import Stack, clean_environment, connection, wait_until
from tests.offline.batch_files import jsonl, line, submit
from workers.scripted_lane import IDENTITY, NAME, VOCAB_SIZE, encode_text, tokenizer_files

SAID = SamplingDefaults(0.6, 0.95, 20, 0.05, 1.05, 64)
MEANT = Sampling(0.6, 0.95, 20, 0.05, 1.05)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack(workers=0, formers=0, batchers=1) as stack:
        yield stack


@pytest_asyncio.fixture(autouse=True)
async def text(stack: Stack) -> AsyncIterator[TextClient]:
    async with await TextClient.open(stack.redis_url) as text:
        card = ModelCard(IDENTITY, NAME, "t1", 2048, 1, VOCAB_SIZE, (0,), SAID)
        worker = make.registration("w1", lane=make.lane(model=IDENTITY))
        await text.client.scripts.register(
            Registration("w1", worker.fields, 8, None, IDENTITY, encode(card), "t1", tokenizer_files())
        )
        yield text


def waiting(stack: Stack, prompt: str) -> Request:
    """The request in the queue whose prompt ends in this text; the lane's tokens are bytes."""
    found: list[Request] = []

    def is_there() -> bool:
        with connection(stack.redis_url) as client:
            entries = client.xrange(keys.WAIT_OFFLINE)
            bodies = [client.hget(keys.state(fields[b"id"].decode()), "body") for _, fields in entries]
        found[:] = [decode_request(body) for body in bodies if body is not None]
        found[:] = [each for each in found if each.prompt.endswith(encoded(prompt))]
        return bool(found)

    wait_until(is_there, "the request waits", timeout_s=120, on_timeout=stack.logs)
    return found[0]


def encoded(text: str) -> bytes:
    return pack_tokens(encode_text(text))


async def test_program_that_enqueues_text_gets_the_models_defaults(text: TextClient, stack: Stack) -> None:
    call = await text.complete("program", model=NAME, seed=1, min_tokens=9, temperature=None)

    request = waiting(stack, "program")

    assert (request.sampling, request.max_tokens, request.min_tokens) == (MEANT, 64, 9)
    await call.cancel()


async def test_direct_enqueueing_of_tokens_keeps_what_is_written(text: TextClient, stack: Stack) -> None:
    request = Request("raw", IDENTITY, "balanced", encoded("tokens"), 7)
    client: Client = text.client

    await client.enqueue(request, Ticket("raw", IDENTITY, "balanced", 6, 7, "offline"))

    assert waiting(stack, "tokens") == request
    await client.cancel("raw", "client")


def test_lines_of_a_batch_get_the_models_defaults_and_their_own(stack: Stack) -> None:
    with OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as openai:
        lines = [line("line-a", max_tokens=None), line("line-b", temperature=0, top_k=-1, min_tokens=3)]
        batch = submit(openai, jsonl(lines))

        first, second = waiting(stack, "line-a"), waiting(stack, "line-b")
        openai.batches.cancel(batch.id)

    assert (first.sampling, first.max_tokens, first.min_tokens) == (MEANT, 64, 0)
    assert (second.sampling, second.max_tokens) == (Sampling(0.0, 0.95, 0, 0.05, 1.05), 8)
    assert second.min_tokens == 3


def test_run_gets_the_models_defaults(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps("row") + "\n")
    command = [*mtplx_command("run"), "p.jsonl", "-o", "a.jsonl", "--raw", "--redis", stack.redis_url]
    process = subprocess.Popen([*command, "--set", "min_tokens=5"], cwd=tmp_path, env=clean_environment())

    request = waiting(stack, "row")
    process.send_signal(signal.SIGINT)

    assert process.wait(60) == 130
    assert (request.sampling, request.max_tokens, request.min_tokens) == (MEANT, 64, 5)
