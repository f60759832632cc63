"""The one door to Redis: how clients are made, which replies they give, and how their failures are translated.

Command clients retry a little, since every script is safe to run twice. Blocking reads and pub/sub need a client
of their own without a socket time-out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import RedisError

from broker.connection.failures import as_broker_error
from broker.connection.pool import WaitingPool
from broker.errors import BrokerConfigError, BrokerUnavailableError

CONNECT_TIMEOUT_S = 1.0
COMMAND_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 32
VANISHED_S = 30
PROBES = 3
_TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_USER_PART = re.compile("(?<=://)([^/?#:]*):[^/?#]*@")
_SECRET = re.compile("(?<=password=)[^&#]+")


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
        options |= {"socket_keepalive": True, "socket_keepalive_options": keepalive_options()}
    with reading_url(url):
        pool = WaitingPool.from_url(url, places=connections, **options)
        try_options(pool.connection_class, pool.connection_kwargs)
    return Redis.from_pool(pool)


def keepalive_options() -> dict[int, int]:
    """Return TCP options with which a connection ends once its other end has been silent for `VANISHED_S`.

    The system's own default is two hours.
    """
    names = ("TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
    values = (VANISHED_S // 2, VANISHED_S // (2 * PROBES), PROBES)
    pairs = zip(names, values, strict=True)
    return {int(getattr(socket, name)): value for name, value in pairs if hasattr(socket, name)}


@contextlib.contextmanager
def reading_url(url: str) -> Iterator[None]:
    """Turns what redis-py says about a URL it cannot use into `BrokerConfigError`."""
    try:
        yield
    except (ValueError, TypeError, RedisError) as error:
        allowed = "redis://, rediss:// or unix:// URLs, with %20 for a space, %3F for a question mark and the like"
        raise BrokerConfigError(f"redis = {without_password(url)!r}: {error}; allowed: {allowed}") from error


def try_options(connection_class: type[Any], options: Mapping[str, Any]) -> None:
    """Make a connection that connects to nothing, since a pool would look at a URL's options at the first command.

    Raises:
        ValueError: a file of TLS is not there. TypeError, RedisError: the options are none of this connection's.
    """
    connection_class(**options)
    for name in _TLS_FILES:
        if (path := options.get(name)) and not os.access(path, os.R_OK):
            raise ValueError(f"{name}={path} cannot be read")


def without_password(url: str) -> str:
    """A Redis URL that can be shown."""
    return _SECRET.sub("***", _USER_PART.sub(r"\1:***@", url))


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raises what `meanings` makes of a failure: `BrokerUnavailableError`, of which `BrokerDeniedError` is one kind."""
    try:
        yield
    except (RedisError, OSError, RuntimeError) as error:
        meant = as_broker_error(error)
        if meant is None:
            raise
        raise meant from error


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
