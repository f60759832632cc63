"""The one way in to Redis for daemons and commands: wait for it and say so once, or refuse with one sentence.

A daemon calls `enter` before anything else, a command works inside `opened`. Either ends with `BrokerConfigError`
where only a person can help.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, cast

from redis.asyncio import Redis

from broker.connection.connect import answered_within, connect, translated
from broker.connection.rights import missing_rights
from broker.errors import BrokerConfigError, BrokerDeniedError, BrokerUnavailableError

logger = logging.getLogger(__name__)

Check = Callable[[Redis], Awaitable[None]]

ANSWER_S = 10.0
AGAIN_S = 0.5
OLDEST_MAJOR = 7


async def enter(url: str, *, who: str, is_start: bool = True) -> bool:
    """Wait until Redis can be used; False when SIGTERM or SIGINT came first.

    Args:
        who: the daemon, for the lines in the log, such as `the former`.
        is_start: False for a daemon that has worked before, which waits out a denial too.

    Raises:
        BrokerConfigError: Redis refuses this process, or may lose accepted requests.
    """
    client = connect(url)
    try:
        with _told_to_stop() as stopping:
            return await _wait_until_usable(client, stopping, who=who, check=_check if is_start else check_server)
    finally:
        await client.aclose()


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[Redis]:
    """A client for the length of one command.

    Raises:
        BrokerConfigError: Redis refuses this process.
    """
    client = connect(url)
    try:
        with refused():
            yield client
    finally:
        await client.aclose()


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Turns a denial, which a running daemon waits out, into the error that ends a start or a command."""
    try:
        yield
    except BrokerDeniedError as error:
        raise BrokerConfigError(str(error)) from error


async def check_server(client: Redis) -> None:
    """Look at what Redis says of itself.

    Raises:
        BrokerUnavailableError: it loads, or is a replica, which a failover may promote.
        BrokerConfigError: it may evict keys, is too old, or is no single primary.
    """
    with translated():
        info = cast("Mapping[str, Any]", await client.info())
    if info.get("loading") == 1:
        raise BrokerUnavailableError("Redis cannot be used: it is loading its data")
    if info.get("role") == "slave":
        raise BrokerUnavailableError("Redis cannot be used: it is a replica, and takes no writes until it is promoted")
    if reason := _unfit(info):
        raise BrokerConfigError(reason)


async def _wait_until_usable(client: Redis, stopping: asyncio.Event, *, who: str, check: Check) -> bool:
    said: set[str] = set()
    while not stopping.is_set():
        try:
            async with answered_within(ANSWER_S):
                await check(client)
        except BrokerUnavailableError as error:
            if str(error) not in said:
                logger.warning("%s waits: %s", who, error)
            said.add(str(error))
        else:
            if said:
                logger.info("%s goes on: Redis can be used", who)
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(AGAIN_S):
                await stopping.wait()
    return False


async def _check(client: Redis) -> None:
    with refused():
        await check_server(client)
        if rules := await missing_rights(client):
            grant = " ".join(f"'{rule}'" for rule in rules)
            raise BrokerConfigError(
                f"Redis refuses: its user lacks rights; grant them with ACL SETUSER NAME {grant} "
                "(docs/operations.md has the whole rule)"
            )


def _unfit(info: Mapping[str, Any]) -> str:
    """Why accepted requests would be lost on this server; empty when they would not."""
    policy, version = info.get("maxmemory_policy", "noeviction"), str(info.get("redis_version", ""))
    if policy != "noeviction":
        return (
            f"maxmemory-policy = {policy}: Redis may evict accepted requests; allowed: noeviction "
            "(redis-cli CONFIG SET maxmemory-policy noeviction)"
        )
    if info.get("redis_mode") == "sentinel":
        return "this port is a Sentinel's; give the URL of the primary that it watches"
    if info.get("cluster_enabled") == 1:
        return "cluster-enabled = yes: batches use keys of many slots; allowed: one primary that is in no cluster"
    major = version.partition(".")[0]
    if "valkey_version" not in info and major.isdigit() and int(major) < OLDEST_MAJOR:
        return f"Redis {version} is too old; allowed: Redis {OLDEST_MAJOR}.0 or newer, or Valkey"
    return ""


@contextlib.contextmanager
def _told_to_stop() -> Iterator[asyncio.Event]:
    """Set by SIGTERM and SIGINT for the length of the block."""
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stopping.set)
    try:
        yield stopping
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
