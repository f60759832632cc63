"""The heartbeat of a process that serves the API outlives any trouble. Engine: none; Redis: as each test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import pytest
from redis.asyncio import Redis
from redis.exceptions import ReadOnlyError, ResponseError

from broker.client.client import Client
from broker.errors import BrokerConfigError, BrokerUnavailableError
from broker.registry import Registry
from broker.scripts import Scripts
from harness.redis_servers import ChildServer, InProcessServer
from harness.relay import relayed
from harness.wait import wait_until
from tests.broker.conftest import ChildServers

TROUBLES = (
    BrokerUnavailableError("away"),
    BrokerConfigError("no password"),
    ReadOnlyError("no writes"),
    ResponseError("ERR something new"),
    TimeoutError("late"),
    RuntimeError("a bug"),
)


class Beats:
    """Takes the place of BEAT: fails as it is told, then answers."""

    def __init__(self, *troubles: Exception) -> None:
        self.answered = 0
        self._troubles = list(troubles)

    async def __call__(self, daemon_id: str, changed: Mapping[str, str | int]) -> int:
        await asyncio.sleep(0)
        if self._troubles:
            raise self._troubles.pop(0)
        self.answered += 1
        return self.answered

    async def have_been_heard(self) -> bool:
        return self.answered > 0


@pytest.fixture
async def listener(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    """A process at fakeredis, whose heartbeats follow each other without a pause."""
    monkeypatch.setattr("broker.client.client.IDLE_BEAT_S", 0.0)
    server = InProcessServer()
    listener = await Client.over(server.client(), server.client(blocking=True))
    yield listener
    await listener.close()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "heartbeat" in record.getMessage()]


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: type(trouble).__name__)
async def test_heartbeat_goes_on_after_any_trouble(
    listener: Client, monkeypatch: pytest.MonkeyPatch, trouble: Exception
) -> None:
    beats = Beats(trouble)
    monkeypatch.setattr(listener.scripts, "beat", beats)

    await wait_until(beats.have_been_heard, "a heartbeat is heard")


async def test_heartbeat_tells_of_each_kind_of_trouble_once(
    listener: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    away, bug = BrokerUnavailableError("away"), RuntimeError("a bug")
    beats = Beats(away, away, bug, away, bug)
    monkeypatch.setattr(listener.scripts, "beat", beats)

    await wait_until(beats.have_been_heard, "a heartbeat is heard")

    assert warnings_of(caplog) == ["heartbeat not sent: away", "heartbeat not sent: a bug"]


async def test_heartbeat_tells_of_trouble_that_comes_back(
    listener: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        beats = Beats(BrokerUnavailableError("away"))
        monkeypatch.setattr(listener.scripts, "beat", beats)
        await wait_until(beats.have_been_heard, "a heartbeat is heard")

    assert warnings_of(caplog) == ["heartbeat not sent: away"] * 2


async def test_process_registers_anew_when_the_trouble_is_over(
    listener: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Scripts(listener.commands)
    beats = Beats(RuntimeError("a bug"))
    monkeypatch.setattr(listener.scripts, "beat", beats)
    await wait_until(beats.have_been_heard, "a heartbeat is heard")
    await other.retire(listener.id)
    monkeypatch.undo()

    async def is_registered() -> bool:
        return [record.id for record in await Registry(listener.commands).daemons()] == [listener.id]

    await wait_until(is_registered, "the process has registered anew")


async def beats_of(client: Redis) -> int:
    [record] = await Registry(client).daemons()
    return record.beat


@pytest.mark.parametrize("name", ["valkey", "redis"])
async def test_heartbeat_gives_a_dead_connection_up_and_is_heard_over_another(
    name: str, child_servers: ChildServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = child_servers.get(name)  # type: ignore[arg-type]  # a literal by parametrisation
    assert isinstance(child, ChildServer)
    child.flush()
    client = child.client()
    monkeypatch.setattr("broker.connection.connect.COMMAND_TIMEOUT_S", 3600.0)
    monkeypatch.setattr("broker.client.client.BEAT_WITHIN_S", 0.1)
    async with relayed(child) as relay:
        listener = await Client.over(relay.client(), child.client(blocking=True))
        relay.lose_connections()
        before = await beats_of(client)

        async def has_beaten() -> bool:
            return await beats_of(client) > before

        await wait_until(has_beaten, "a heartbeat is heard")
        await listener.close()
    await client.aclose()
