"""How failures of Redis' client are translated. Engine: none; no Redis."""

from __future__ import annotations

import pytest
from redis.exceptions import OutOfMemoryError, ResponseError

from broker.connection import connect, translated
from broker.errors import BrokerConfigError, BrokerUnavailableError


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
    "error", [ResponseError("ERR wrong number of arguments"), RuntimeError("no running event loop")], ids=str
)
def test_our_own_mistakes_are_not_translated(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)), translated():
        raise error


def test_url_of_another_kind_is_refused() -> None:
    with pytest.raises(BrokerConfigError, match="allowed: redis://"):
        connect("http://localhost")
