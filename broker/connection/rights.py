"""The rights of an ACL user that suffice for every daemon and command, and which of them a connection lacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from broker import keys
from broker.connection.connect import translated

KEY_RULES = (f"~{keys.TAG}:*", f"~{keys.FOREIGN}")
CHANNEL_RULES = (f"&{keys.TAG}:*", f"&{keys.FOREIGN}")
_NAMES = (f"{keys.TAG}:probe", "rq:probe")
_FIRST = ("multi", "exec", "discard", "watch", "unwatch", "select")
"""Rights that cannot be asked for inside a transaction, or are needed to begin a connection."""
_CALLS: tuple[str, ...] = (
    *("get KEY", "set KEY x", "getrange KEY 0 0", "mget KEY", "append KEY x", "strlen KEY", "incr KEY"),
    *("del KEY", "exists KEY", "expire KEY 1", "pexpire KEY 1", "persist KEY", "ttl KEY", "pttl KEY"),
    *("hget KEY x", "hset KEY x x", "hsetnx KEY x x", "hdel KEY x", "hexists KEY x", "hgetall KEY", "hkeys KEY"),
    *("hmget KEY x", "hincrby KEY x 1", "hincrbyfloat KEY x 1"),
    *("lrange KEY 0 0", "rpush KEY x", "lpush KEY x", "lpop KEY", "lrem KEY 1 x", "llen KEY", "lpos KEY x"),
    *("lmove KEY KEY left left", "blmove KEY KEY left left 1"),
    *("sadd KEY x", "srem KEY x", "smembers KEY", "scard KEY"),
    *("zadd KEY 1 x", "zrem KEY x", "zrange KEY 0 0", "zrevrange KEY 0 0", "zrangebyscore KEY 0 0", "zrank KEY x"),
    *("zrevrank KEY x", "zscore KEY x", "zcard KEY", "zremrangebyscore KEY 0 0"),
    *("xadd KEY * x x", "xdel KEY 0-1", "xlen KEY", "xrange KEY - +", "xrevrange KEY + -", "xread streams KEY 0"),
    *("publish KEY x", "subscribe KEY", "unsubscribe KEY"),
    *("evalsha ffffffffffffffffffffffffffffffffffffffff 0", "script|load x", "script|exists x"),
    *("info", "time", "ping", "client|id"),
)
"""One call of each command, with KEY where it names a key or channel."""


def acl_rules() -> list[str]:
    """The least rules, as `ACL SETUSER` takes them."""
    return [*KEY_RULES, *CHANNEL_RULES, *sorted(f"+{name}" for name in (*_FIRST, *(c.split()[0] for c in _CALLS)))]


async def missing_rights(client: Redis) -> list[str]:
    """The rules to grant, in order; none when nothing is lacking.

    Every command is queued in a transaction that never runs: Redis says at once which of them the user may not run.

    Raises:
        BrokerUnavailableError: Redis cannot be used now. BrokerDeniedError: it does not know a command.
    """
    with translated():
        pool: Any = client.connection_pool
        connection = await pool.get_connection()
        try:
            return await _ask(connection)
        finally:
            await connection.disconnect()  # drops the transaction
            await pool.release(connection)


async def _ask(connection: Any) -> list[str]:
    try:
        await _send(connection, ["MULTI"])
    except NoPermissionError:
        return ["+multi"]
    calls = list(_calls())
    for call in calls:
        await connection.send_command(*call)
    lacking: dict[str, None] = {}
    for call in calls:
        try:
            await connection.read_response()
        except NoPermissionError as error:
            lacking |= dict.fromkeys(_rules_for(call, str(error)))
    return list(lacking)


async def _send(connection: Any, call: Sequence[str]) -> None:
    await connection.send_command(*call)
    await connection.read_response()


def _calls() -> Iterator[list[str]]:
    for call in _CALLS:
        command, *words = call.split()
        for name in _NAMES if "KEY" in words and command in ("exists", "publish") else _NAMES[:1]:
            yield [*command.split("|"), *(name if word == "KEY" else word for word in words)]


def _rules_for(call: Sequence[str], refusal: str) -> list[str]:
    if " channel" in refusal:
        return list(CHANNEL_RULES)
    if " key" in refusal:
        return list(KEY_RULES)
    has_part = call[0] in ("script", "client")
    return ["+" + ("|".join(call[:2]) if has_part else call[0])]
