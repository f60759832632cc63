"""Events that scripts write themselves decode to the same structs, at every length. Redis: all three servers."""

from __future__ import annotations

from typing import Any, cast

import pytest
from redis.asyncio import Redis

from broker import keys
from broker.scripts import RowCommit, Scripts
from broker.wire import Failed, Finished, decode_events, pack_tokens
from harness.reads import read_end
from harness.running import accept, run_rows

IDS = ["r", "r" * 31, "r" * 32, "r" * 255, "r" * 256, "r" * 1000, "räksmörgås-€"]


@pytest.mark.parametrize("request_id", IDS, ids=[f"{len(each.encode())} bytes" for each in IDS])
async def test_finished_event_is_read_whatever_the_length_of_the_id(
    scripts: Scripts, client: Redis, request_id: str
) -> None:
    await accept(scripts, request_id)
    await scripts.cancel(request_id, "client")

    assert await read_end(client, request_id) == Finished(request_id, "cancelled", 0, -1, "client")


@pytest.mark.parametrize("length", [1, 127, 128, 255, 256, 65_535, 65_536, 300_000])
async def test_finished_event_is_read_whatever_the_length_of_the_log(
    scripts: Scripts, client: Redis, length: int
) -> None:
    [seat] = await run_rows(scripts, "r1")
    await scripts.commit("w1", [RowCommit(seat, 0, pack_tokens([1]) * length)], {})
    await scripts.hand_back("w1", [seat], is_crash=False)
    await scripts.cancel("r1", "operator")

    assert await read_end(client, "r1") == Finished("r1", "cancelled", length, -1, "operator")


async def test_failed_event_is_read_when_a_request_is_given_up(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")
    await scripts.hand_back("w1", [seat], is_crash=True, max_crashes=1)

    message = "the request was given up after 1 workers died with it"
    assert await read_end(client, "r1") == Failed("r1", "crashed_workers", message)


@pytest.mark.parametrize("why", ["", "ä" * 200, "long " * 500])
async def test_failed_event_is_read_whatever_the_reason(scripts: Scripts, client: Redis, why: str) -> None:
    await accept(scripts, "r1")
    [(entry_id, entry)] = await cast("Any", client.xrange(keys.WAIT_INTERACTIVE))

    await scripts.bury(keys.WAIT_INTERACTIVE, entry_id.decode(), entry, why=why)

    assert await read_end(client, "r1") == Failed("r1", "unreadable", f"the request could not be read: {why}")


async def test_events_of_scripts_and_of_workers_are_one_format() -> None:
    from_script = b"\x91\x96\xa8finished\xa2r1\xa9cancelled\x00\xff\xa6client"

    assert decode_events(from_script) == (Finished("r1", "cancelled", 0, -1, "client"),)
