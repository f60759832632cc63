"""How failures of Redis' client are translated. Engine: none; no Redis."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any, cast

import pytest
from redis._parsers.base import BaseParser
from redis.exceptions import ConnectionError, OutOfMemoryError, ResponseError

from broker.connection.connect import answered_within, connect, keepalive_options, translated
from broker.errors import BrokerConfigError, BrokerDeniedError, BrokerUnavailableError


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


@pytest.mark.parametrize(
    ("reply", "advice"),
    [
        ("WRONGPASS invalid username-password pair or user is disabled.", "give user and password in the URL"),
        ("NOAUTH Authentication required.", "give user and password in the URL"),
        ("NOPERM User batch has no permissions to run the 'xread' command", r"ACL SETUSER batch \+xread"),
        ("NOPERM User batch has no permissions to run the 'script|load' command", r"ACL SETUSER batch \+script\|load"),
        ("NOPERM this user has no permissions to run the 'get' command or its subcommand", r"ACL SETUSER NAME \+get"),
        ("NOPERM No permissions to access a key", r"ACL SETUSER NAME '~\{mtplx\}:\*' '~rq:\*'"),
        ("NOPERM No permissions to access a channel", r"ACL SETUSER NAME '&\{mtplx\}:\*' '&rq:\*'"),
        ("ERR ACL failure in script: User batch has no permissions to run the 'hset' command", r"batch \+hset"),
        ("MOVED 3999 127.0.0.1:6381", "no cluster"),
        ("CROSSSLOT Keys in request don't hash to the same slot", "no cluster"),
        ("ERR unknown command 'LMOVE', with args beginning with: 'a'", "does not know LMOVE"),
        ("ERR DB index is out of range", "another number"),
        ("DENIED Redis is running in protected mode because protected mode is enabled", "protected mode"),
    ],
    ids=lambda text: text[:24],
)
def test_reply_that_redis_refuses_us_is_a_denial_with_advice(reply: str, advice: str) -> None:
    error = as_read(reply)

    with pytest.raises(BrokerDeniedError, match=advice), translated():
        raise error


def test_reply_of_another_kind_is_not_translated() -> None:
    error = as_read("BUSYKEY Target key name already exists.")

    with pytest.raises(type(error)), translated():
        raise error


def connection_error(cause: Exception) -> ConnectionError:
    """What the client raises where connecting failed."""
    try:
        try:
            raise cause
        except type(cause):
            raise ConnectionError("cannot connect")  # noqa: B904 - redis-py leaves the cause to the context as well
    except ConnectionError as error:
        return error


@pytest.mark.parametrize(
    "cause",
    [ssl.SSLCertVerificationError("self-signed certificate"), PermissionError(13, "Permission denied")],
    ids=["certificate", "socket of another user"],
)
def test_connection_that_is_refused_for_who_we_are_is_a_denial(cause: Exception) -> None:
    with pytest.raises(BrokerDeniedError), translated():
        raise connection_error(cause)


@pytest.mark.parametrize(
    "cause",
    [ssl.SSLEOFError("EOF occurred in violation of protocol"), FileNotFoundError(2, "No such file"), OSError("reset")],
    ids=["TLS broken off", "socket that is not there yet", "network"],
)
def test_connection_that_broke_is_waited_for(cause: Exception) -> None:
    with pytest.raises(BrokerUnavailableError) as caught, translated():
        raise connection_error(cause)

    assert not isinstance(caught.value, BrokerDeniedError)


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


@pytest.mark.parametrize(
    "url",
    [
        "http://:secret@localhost",
        "redis://:secret@[::1",
        "redis://:secret@localhost:port",
        "redis://localhost?password=secret&no_such_option=1",
        "rediss://:secret@localhost?ssl_ca_certs=/no/such/file",
        "rediss://:secret@localhost?ssl_cert_reqs=perhaps",
    ],
)
def test_url_that_cannot_be_used_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(BrokerConfigError, match="allowed: redis://") as caught:
        connect(url)

    assert "secret" not in str(caught.value)


async def test_connection_that_waits_for_redis_asks_whether_redis_is_still_there() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(b"+OK\r\n" * data.count(b"*"))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = connect(f"redis://127.0.0.1:{port}", blocking=True)
        pool: Any = client.connection_pool
        connection = await pool.get_connection()
        end = connection._writer.get_extra_info("socket")

        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert all(end.getsockopt(socket.IPPROTO_TCP, name) == value for name, value in keepalive_options().items())
        await connection.disconnect()
        await client.aclose()
