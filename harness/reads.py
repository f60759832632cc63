"""Reads back from Redis what tests assert on."""

from __future__ import annotations

from typing import Any, cast

from redis.asyncio import Redis

from broker import keys
from broker.wire import Assignment, Event, decode_events, unpack_tokens


async def read_jobs(client: Redis, worker_id: str) -> list[list[Assignment]]:
    """The seats of every job that a worker has not taken yet."""
    entries = await cast("Any", client.xrange(keys.jobs(worker_id)))
    return [_seats(entry[b"seats"].decode().split()) for _, entry in entries]


async def read_state(client: Redis, request_id: str) -> dict[str, bytes]:
    """Everything Redis has about a request."""
    raw = await cast("Any", client.hgetall(keys.state(request_id)))
    return {name.decode(): value for name, value in raw.items()}


async def read_status(client: Redis, request_id: str) -> str:
    return (await read_state(client, request_id))["status"].decode()


async def read_end(client: Redis, request_id: str) -> Event:
    """The terminal event of a request."""
    [event] = decode_events((await read_state(client, request_id))["end"])
    return event


async def read_log(client: Redis, request_id: str) -> tuple[int, ...]:
    return unpack_tokens(await cast("Any", client.get(keys.log(request_id))) or b"")


async def read_waiting(client: Redis, stream: str) -> list[str]:
    """The ids in a waiting stream."""
    entries = await cast("Any", client.xrange(stream))
    return [entry[b"id"].decode() for _, entry in entries]


async def read_counts(client: Redis, key: str) -> dict[str, int]:
    """A hash of counters, without those that are 0."""
    raw = await cast("Any", client.hgetall(key))
    return {name.decode(): int(value) for name, value in raw.items() if int(value)}


async def read_free_rows(client: Redis, worker_id: str) -> int:
    return int(await cast("Any", client.hget(keys.daemon(worker_id), "free")))


def _seats(words: list[str]) -> list[Assignment]:
    return [Assignment(request_id, int(attempt)) for request_id, attempt in zip(words[::2], words[1::2], strict=True)]
