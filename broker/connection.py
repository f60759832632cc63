"""The one door to Redis: how clients are made, which replies they give, and how their failures are translated.

Command clients retry a little, since every script is safe to run twice. Blocking reads and pub/sub need a client
of their own without a socket time-out.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import (
    AuthenticationError,
    ClusterDownError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TryAgainError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from broker.errors import BrokerConfigError, BrokerUnavailableError
from broker.pool import WaitingPool

CONNECT_TIMEOUT_S = 1.0
COMMAND_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 32
VANISHED_S = 30
PROBES = 3
_PASSING = (ReadOnlyError, ClusterDownError, TryAgainError)
"""Replies that the client knows by a class of their own; their texts have lost the code. Where a master is down, the
class is one of a cluster that is."""
_PASSING_CODE = re.compile(
    "(?:^|[ -])(?:OOM|LOADING|MISCONF|READONLY|BUSY|CLUSTERDOWN|MASTERDOWN|TRYAGAIN|NOREPLICAS|UNBLOCKED)(?: |$)"
)
"""Codes in a reply's text: at its start, or where a pipeline or a script passes the reply on."""


def connect(url: str, *, blocking: bool = False, connections: int = CONNECTIONS_MAX) -> Redis:
    """A client for any redis-py URL, replies as bytes; nothing is sent before its first command.

    Raises:
        BrokerConfigError: the URL is not one that redis-py reads.
    """
    options: dict[str, Any] = {
        "decode_responses": False,
        "protocol": 2,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": None if blocking else COMMAND_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0) if blocking else Retry(ExponentialBackoff(cap=0.1, base=0.02), 3),
    }
    if blocking and not url.startswith("unix:"):
        # A peer that vanished must end a read that waits for ever.
        options |= {"socket_keepalive": True, "socket_keepalive_options": _keepalive_options()}
    try:
        pool = WaitingPool.from_url(url, places=connections, **options)
    except ValueError as error:
        raise BrokerConfigError(f"redis = {url!r}: {error}; allowed: redis://, rediss:// or unix:// URLs") from error
    return Redis.from_pool(pool)


def _keepalive_options() -> dict[int, int]:
    """A connection whose other end says nothing for `VANISHED_S` ends; the system's own default is two hours."""
    names = ("TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
    values = (VANISHED_S // 2, VANISHED_S // (2 * PROBES), PROBES)
    pairs = zip(names, values, strict=True)
    return {int(getattr(socket, name)): value for name, value in pairs if hasattr(socket, name)}


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Turns what redis-py raises when the server is away, or cannot work for now, into `BrokerUnavailableError`."""
    try:
        yield
    except AuthenticationError as error:
        raise BrokerConfigError(f"Redis refused the password: {error}") from error
    except (ConnectionError, RedisTimeoutError, OutOfMemoryError, NoPermissionError, OSError) as error:
        raise BrokerUnavailableError(f"Redis cannot be used: {error or type(error).__name__}") from error
    except RedisError as error:
        if not is_passing(error):
            raise
        raise BrokerUnavailableError(f"Redis cannot be used: {error}") from error
    except RuntimeError as error:
        # What uvloop says when a connection breaks between a check and a write; redis-py passes it on as it is.
        if "handler is closed" not in str(error):
            raise
        raise BrokerUnavailableError(f"Redis cannot be used: {error}") from error


def is_passing(error: RedisError) -> bool:
    """Whether a reply's error says that Redis itself cannot work now, rather than that the command was wrong."""
    return isinstance(error, _PASSING) or _PASSING_CODE.search(str(error)) is not None


@contextlib.asynccontextmanager
async def answered_within(limit_s: float) -> AsyncIterator[None]:
    """Gives up on what is not answered in time, and on the connection that it was asked over.

    The client closes a connection whose reply nobody waits for any more, so whoever asks again does so over another.

    Raises:
        BrokerUnavailableError: there was no answer in time.
    """
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise BrokerUnavailableError(f"Redis has not answered within {limit_s:g} s") from error


async def server_info(client: Redis, section: str) -> Mapping[str, Any]:
    """One section of INFO."""
    with translated():
        return cast("Mapping[str, Any]", await client.info(section))


async def check_eviction(client: Redis) -> None:
    """Refuse a server that may evict keys.

    Raises:
        BrokerConfigError: the eviction policy is not `noeviction`.
    """
    policy = (await server_info(client, "memory")).get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise BrokerConfigError(
            f"maxmemory-policy = {policy}: Redis may evict accepted requests; allowed: noeviction "
            "(redis-cli CONFIG SET maxmemory-policy noeviction)"
        )
