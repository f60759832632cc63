"""Dead letters: listed, found, tried again, dropped. Engine: none; Redis: all three servers."""

from __future__ import annotations

from typing import Any, cast

import pytest
from redis.asyncio import Redis

from broker import keys
from broker.dead_letters import DeadLetters
from broker.errors import UnknownRequestError, WireError
from broker.scripts import Scripts
from harness.reads import read_state, read_status, read_waiting
from harness.running import run_rows


@pytest.fixture
def dead(client: Redis) -> DeadLetters:
    return DeadLetters(client)


async def give_up(scripts: Scripts, *request_ids: str) -> None:
    """Requests whose worker died with them once too often."""
    seats = await run_rows(scripts, *request_ids)
    await scripts.hand_back("w1", seats, is_crash=True, max_crashes=1)


async def bury_rubbish(client: Redis, scripts: Scripts) -> None:
    entry: dict[Any, Any] = {b"id": b"r9", b"rubbish": b"\xff"}
    entry_id = await cast("Any", client.xadd(keys.WAIT_OFFLINE, entry))
    await scripts.bury(keys.WAIT_OFFLINE, entry_id.decode(), entry, why="cannot decode")


async def test_letters_are_listed_newest_first_with_their_reasons(
    dead: DeadLetters, scripts: Scripts, client: Redis
) -> None:
    await give_up(scripts, "r1")
    await bury_rubbish(client, scripts)

    letters = await dead.all()

    assert [(letter.request_id, letter.why) for letter in letters] == [("r9", "cannot decode"), ("r1", "crashes")]
    assert letters[0].at_ms > 0


async def test_letter_is_found_by_its_own_id_and_by_its_requests(dead: DeadLetters, scripts: Scripts) -> None:
    await give_up(scripts, "r1")

    letter = await dead.find("r1")

    assert await dead.find(letter.id) == letter
    assert letter.request()[0].id == "r1"


async def test_unknown_letter_is_named(dead: DeadLetters) -> None:
    with pytest.raises(UnknownRequestError, match="r1"):
        await dead.find("r1")


async def test_requeued_letter_waits_again_under_a_new_id_and_is_off_the_list(
    dead: DeadLetters, scripts: Scripts, client: Redis
) -> None:
    await give_up(scripts, "r1")

    request_id = await dead.requeue(await dead.find("r1"))

    assert await read_waiting(client, keys.WAIT_OFFLINE) == [request_id]
    assert await read_status(client, "r1") == "failed"
    assert (await read_state(client, request_id))["crashes"] == b"0"
    assert await dead.all() == []


async def test_letter_without_a_whole_request_cannot_be_tried_again(
    dead: DeadLetters, scripts: Scripts, client: Redis
) -> None:
    await bury_rubbish(client, scripts)

    with pytest.raises(WireError):
        await dead.requeue(await dead.find("r9"))

    assert len(await dead.all()) == 1


async def test_dropped_letter_is_gone(dead: DeadLetters, scripts: Scripts, client: Redis) -> None:
    await give_up(scripts, "r1")

    await dead.drop(await dead.find("r1"))

    assert int(await cast("Any", client.xlen(keys.DEAD_LETTERS))) == 0
