"""Random bytes in every stream, channel and record: no daemon dies, no answer is wrong. Scripted engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from broker import keys
from broker.client.client import Client
from harness.scripted import ask, hear
from harness.stack import Stack, connection, wait_until
from harness.wait import PATIENCE_S

ENTRIES = 40
Spoil = Callable[[Any, random.Random], None]


def some_bytes(chance: random.Random) -> bytes:
    """Nothing, a few bytes, or many; some of them begin like MessagePack arrays and maps do."""
    opening = chance.choice([b"", b"\x91", b"\x9f", b"\xdc\xff\xff", b"\x85", b"\xc6\xff\xff\xff\xff", b"\xc1"])
    return opening + chance.randbytes(chance.choice([0, 1, 7, 60, 3000]))


def some_fields(chance: random.Random, *names: str) -> dict[bytes, bytes]:
    """Fields of a stream entry or a hash, some under the names a reader looks for."""
    known = [name.encode() for name in names if chance.random() < 0.7]
    return {name: some_bytes(chance) for name in [*known, some_bytes(chance) or b"x"]}


def spoil_waiting_streams(redis: Any, chance: random.Random) -> None:
    for stream in (keys.WAIT_INTERACTIVE, keys.WAIT_OFFLINE, keys.WAIT_RETURNED):
        redis.xadd(stream, some_fields(chance, "id", "ticket", "ordinal", "wire", "min_wire"))


def spoil_waiting_requests(redis: Any, chance: random.Random) -> None:
    """Entries that name a request whose record is rubbish."""
    request_id = f"rubbish-{chance.getrandbits(64):x}"
    fields = some_fields(chance, "body", "ticket", "status", "priority", "attempt", "ordinal", "accepted_ms")
    redis.hset(keys.state(request_id), mapping=fields)
    redis.expire(keys.state(request_id), 60)
    redis.set(keys.log(request_id), some_bytes(chance), ex=60)
    redis.xadd(keys.WAIT_INTERACTIVE, {**some_fields(chance, "ticket"), b"id": request_id.encode()})


def spoil_jobs(redis: Any, chance: random.Random) -> None:
    for daemon_id in redis.smembers(keys.DAEMONS):
        record = redis.hget(keys.daemon(daemon_id.decode()), "kind")
        if record == b"worker":
            redis.xadd(keys.jobs(daemon_id.decode()), some_fields(chance, "seats", "wire", "cohort", "formed_ms"))


def spoil_channels(redis: Any, chance: random.Random) -> None:
    for channel in (*redis.pubsub_channels(keys.reply("*").encode()), keys.CONTROL, keys.WAKE):
        redis.publish(channel, some_bytes(chance))


def spoil_daemon_records(redis: Any, chance: random.Random) -> None:
    """Daemons that never were."""
    daemon_id = f"nobody-{chance.getrandbits(64):x}"
    fields = some_fields(chance, "kind", "beat", "lane", "free_rows", "free_tokens", "accepting", "snapshot", "wire")
    redis.hset(keys.daemon(daemon_id), mapping=fields)
    redis.expire(keys.daemon(daemon_id), 60)
    redis.sadd(keys.DAEMONS, daemon_id)


def spoil_model_cards(redis: Any, chance: random.Random) -> None:
    redis.hset(keys.MODELS, f"rubbish-{chance.getrandbits(16):x}", some_bytes(chance))


SPOILERS: tuple[Spoil, ...] = (
    spoil_waiting_streams,
    spoil_waiting_requests,
    spoil_jobs,
    spoil_channels,
    spoil_daemon_records,
    spoil_model_cards,
)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack(workers=2)
    stack.arguments["worker"] = ("--engine", "scripted", "--script-step-s", "0.005")
    with stack:
        yield stack


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda spoil: spoil.__name__)
async def test_daemons_live_and_answer_right_when_rubbish_is_put_in(stack: Stack, spoil: Spoil) -> None:
    chance = random.Random(spoil.__name__)
    client = await Client.open(stack.redis_url)
    try:
        before = ask("before and during", 80)
        handle = await client.submit(before.request, before.ticket)
        with connection(stack.redis_url) as redis:
            for _ in range(ENTRIES):
                spoil(redis, chance)
        during = await hear(handle)
        after = ask(f"after {spoil.__name__}", 30)
        heard = await hear(await client.submit(after.request, after.ticket))
    finally:
        await client.close()

    assert (during.tokens, heard.tokens) == (before.expected, after.expected)
    body = {"model": "scripted", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
    assert httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).status_code == 200
    for path in ("/health", "/metrics", "/v1/models"):
        assert httpx.get(f"{stack.url}{path}", timeout=PATIENCE_S).status_code == 200
    assert [name for name, process in stack.processes.items() if process.poll() is not None] == []
    wait_until(lambda: is_empty(stack), "nothing unreadable is left in line", on_timeout=stack.logs)


def is_empty(stack: Stack) -> bool:
    """Whether no entry is left in any waiting or job stream."""
    with connection(stack.redis_url) as redis:
        streams = [keys.WAIT_INTERACTIVE, keys.WAIT_OFFLINE, keys.WAIT_RETURNED]
        streams += [key.decode() for key in redis.keys(keys.jobs("*"))]
        return all(redis.xlen(stream) == 0 for stream in streams)
