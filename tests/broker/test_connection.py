"""How failures of Redis' client are translated. Engine: none; no Redis."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from redis._parsers.base import BaseParser
from redis.exceptions import OutOfMemoryError, ResponseError

from broker.connection import answered_within, connect, translated
from broker.errors import BrokerConfigError, BrokerUnavailableError


def as_read(reply: str) -> Exception:
    """What the client makes of an error that a server replies with."""
    return cast("Exception", cast("Any", BaseParser).parse_error(reply))


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("reset"),
        OutOfMemoryError("OOM command not allowed"),
        ResponseError("LOADING Redis is loading the dataset in memory"),
        RuntimeError("unable to perform operation on <TCPTransport closed=True reading=False>; the handler is closed"),
    ],
    ids=["connection", "memory", "loading", "connection that broke before a write, under uvloop"],
)
def test_failure_of_redis_is_translated(error: Exception) -> None:
    with pytest.raises(BrokerUnavailableError), translated():
        raise error


@pytest.mark.parametrize(
    "reply",
    [
        "READONLY You can't write against a read only replica.",
        "CLUSTERDOWN The cluster is down",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "LOADING Redis is loading the dataset in memory",
        "OOM command not allowed when used memory > 'maxmemory'.",
        "MISCONF Redis is configured to save RDB snapshots, but it is currently not able to persist on disk.",
        "BUSY Redis is busy running a script.",
        "NOREPLICAS Not enough good replicas to write.",
        "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
        "NOPERM this user has no permissions to run the 'evalsha' command",
        "ERR Error running script (call to f_a): @user_script:1: -READONLY You can't write against a replica.",
    ],
    ids=lambda reply: reply.split()[0],
)
def test_reply_that_redis_cannot_work_now_is_translated(reply: str) -> None:
    error = as_read(reply)

    with pytest.raises(BrokerUnavailableError), translated():
        raise error


@pytest.mark.parametrize("reply", ["BUSYKEY Target key name already exists.", "WRONGTYPE another kind of value"])
def test_reply_of_another_kind_is_not_translated(reply: str) -> None:
    error = as_read(reply)

    with pytest.raises(type(error)), translated():
        raise error


@pytest.mark.parametrize(
    "error", [ResponseError("ERR wrong number of arguments"), RuntimeError("no running event loop")], ids=str
)
def test_our_own_mistakes_are_not_translated(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)), translated():
        raise error


async def test_limit_ends_what_is_not_answered() -> None:
    with pytest.raises(BrokerUnavailableError, match="answered"):
        async with answered_within(0.0):
            await asyncio.Event().wait()


async def test_limit_passes_other_time_outs_on() -> None:
    with pytest.raises(TimeoutError, match="of the work itself"):
        async with answered_within(60.0):
            raise TimeoutError("of the work itself")


def test_url_of_another_kind_is_refused() -> None:
    with pytest.raises(BrokerConfigError, match="allowed: redis://"):
        connect("http://localhost")
