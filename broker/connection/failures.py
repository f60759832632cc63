"""What a failure of Redis' client means: Redis cannot be used for now, Redis refuses us, or we made a mistake.

The one classification for all daemons and commands; `connection.translated` applies it.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator

from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    ClusterCrossSlotError,
    ClusterDownError,
    ConnectionError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TryAgainError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from broker.errors import BrokerDeniedError, BrokerUnavailableError

_PASSING = (ReadOnlyError, ClusterDownError, TryAgainError)
"""Replies that the client knows by a class of their own; their texts have lost the code. Where a master is down, the
class is one of a cluster that is."""
_PASSING_CODE = re.compile(
    "(?:^|[ -])(?:OOM|LOADING|MISCONF|READONLY|BUSY|CLUSTERDOWN|MASTERDOWN|TRYAGAIN|NOREPLICAS|UNBLOCKED)(?: |$)"
)
"""Codes in a reply's text: at its start, or where a pipeline or a script passes the reply on."""
_NO_RIGHT = re.compile("NOPERM|ACL failure in script|no permissions to |executing the script can't")
_COMMAND = re.compile("run the '([^']+)' command")
_USER = re.compile("User (\\S+) has no permissions")
_UNKNOWN = re.compile("unknown command [`'\"]?([A-Za-z|]+)")
_BROKEN_OFF = (
    ssl.SSLEOFError,
    ssl.SSLZeroReturnError,
    ssl.SSLSyscallError,
    ssl.SSLWantReadError,
    ssl.SSLWantWriteError,
)
"""Ends of an encrypted connection, by either side or the network; all other errors of TLS are about who is who."""


def as_broker_error(error: Exception) -> BrokerUnavailableError | None:
    """The error to raise instead of this one; None when it is a mistake of ours, or no failure of Redis at all."""
    if reason := _denial(error):
        return BrokerDeniedError(f"Redis refuses: {reason}")
    if isinstance(error, ConnectionError | RedisTimeoutError | OutOfMemoryError | OSError) or is_passing(error):
        return BrokerUnavailableError(f"Redis cannot be used: {error or type(error).__name__}")
    # What uvloop says when a connection breaks between a check and a write; redis-py passes it on as it is.
    if isinstance(error, RuntimeError) and "handler is closed" in str(error):
        return BrokerUnavailableError(f"Redis cannot be used: {error}")
    return None


def is_passing(error: Exception) -> bool:
    """Whether a reply's error says that Redis itself cannot work now, rather than that the command was wrong."""
    if not isinstance(error, RedisError):
        return False
    return isinstance(error, _PASSING) or _PASSING_CODE.search(str(error)) is not None


def _denial(error: Exception) -> str:
    """The sentence for a refusal that lasts until a person changes something; empty for any other failure.

    What is refused while a connection is made comes inside another error.
    """
    return next((reason for each in _chain(error) if (reason := _denying(each, error))), "")


def _denying(cause: BaseException, error: Exception) -> str:
    if isinstance(cause, AuthenticationError | AuthenticationWrongNumberOfArgsError):
        return f"{cause}; give user and password in the URL: MTPLX_REDIS=redis://USER:PASSWORD@HOST:6379/0"
    if isinstance(cause, MovedError | AskError | ClusterCrossSlotError):
        return f"{cause} is a cluster's answer; give the URL of one primary that is in no cluster"
    if isinstance(cause, RedisError):
        return _denying_reply(cause)
    if isinstance(cause, ssl.SSLError) and not isinstance(cause, _BROKEN_OFF) and "EOF" not in str(cause):
        return (
            f"TLS: {cause}; rediss:// speaks TLS and redis:// does not, ?ssl_ca_certs=FILE names the "
            "certificate authority, &ssl_certfile=FILE&ssl_keyfile=FILE our own certificate"
        )
    if isinstance(cause, PermissionError):
        return f"{error}; let this user connect to the socket"
    return ""


def _denying_reply(error: RedisError) -> str:
    text = str(error)
    if isinstance(error, NoPermissionError) or _NO_RIGHT.search(text):
        return f"{text}; grant it with {_grant(text)} (docs/operations.md has the whole rule)"
    if unknown := _UNKNOWN.search(text):
        return f"it does not know {unknown[1].upper()}; use Redis 7.0 or newer, or Valkey, with all of its commands"
    if "DB index is out of range" in text or "SELECT is not allowed" in text:
        return f"{text}; give another number, or none, at the end of the URL"
    return text if "protected mode" in text else ""


def _grant(text: str) -> str:
    """The ACL rule that a refusal asks for."""
    command, user = _COMMAND.search(text), _USER.search(text)
    if command:
        rule = f"+{command[1].lower()}"
    else:
        rule = "'&{mtplx}:*' '&rq:*'" if "channel" in text else "'~{mtplx}:*' '~rq:*'"
    return f"ACL SETUSER {user[1] if user else 'NAME'} {rule}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what caused it."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__
