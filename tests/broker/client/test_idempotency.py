"""Idempotency keys, and requests that outlive their listener. Engine: none; Redis: all three servers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from redis.asyncio import Redis

from broker import keys
from broker.errors import ConflictError
from broker.scripts import DEFAULT_BOUNDS, Idempotency, RowFinish, Scripts, Submission
from broker.wire import Assignment, Failed, Ticket
from harness import factories as make
from harness.reads import read_waiting

NAME = Idempotency("order-66")


def named(request_id: str, *, ticket: Ticket | None = None, reply: str = "") -> Submission:
    ticket = ticket or make.ticket(request_id)
    return replace(make.submission(request_id, ticket=ticket, reply=reply), seed=None, idempotency=NAME)


def saying(words: str, request_id: str, *, max_tokens: int = 16, model: str = make.MODEL) -> Submission:
    asked = named(request_id, ticket=make.ticket(request_id, max_tokens=max_tokens, model=model))
    return replace(asked, idempotency=NAME._replace(said=words))


async def test_accept_answers_with_the_first_request_when_the_key_is_known(scripts: Scripts, client: Redis) -> None:
    await scripts.accept(named("r1"), DEFAULT_BOUNDS)

    again = await scripts.accept(named("r2"), DEFAULT_BOUNDS)

    assert (again.request_id, again.is_new) == ("r1", False)
    assert await read_waiting(client, keys.WAIT_INTERACTIVE) == ["r1"]


async def test_accept_refuses_another_body_under_a_known_key(scripts: Scripts) -> None:
    await scripts.accept(named("r1"), DEFAULT_BOUNDS)

    with pytest.raises(ConflictError):
        await scripts.accept(named("r2", ticket=make.ticket("r2", max_tokens=17)), DEFAULT_BOUNDS)


async def test_accept_knows_a_call_by_what_was_said_whatever_was_made_of_it(scripts: Scripts) -> None:
    await scripts.accept(saying("hello", "r1"), DEFAULT_BOUNDS)

    again = await scripts.accept(saying("hello", "r2", max_tokens=17), DEFAULT_BOUNDS)

    assert (again.request_id, again.is_new) == ("r1", False)


@pytest.mark.parametrize(("said", "model"), [("good-bye", make.MODEL), ("hello", "tiny@0a1c")])
async def test_accept_refuses_other_words_or_another_model_under_a_known_key(
    scripts: Scripts, said: str, model: str
) -> None:
    await scripts.accept(saying("hello", "r1"), DEFAULT_BOUNDS)

    with pytest.raises(ConflictError):
        await scripts.accept(saying(said, "r2", model=model), DEFAULT_BOUNDS)


async def test_accept_keeps_the_keys_of_two_api_keys_apart(scripts: Scripts) -> None:
    await scripts.accept(named("r1", ticket=make.ticket("r1", key_id="one")), DEFAULT_BOUNDS)

    other = await scripts.accept(named("r2", ticket=make.ticket("r2", key_id="two")), DEFAULT_BOUNDS)

    assert other.is_new


async def test_key_is_free_again_when_its_request_was_cancelled(scripts: Scripts) -> None:
    await scripts.accept(named("r1"), DEFAULT_BOUNDS)
    await scripts.cancel("r1", "client")

    assert (await scripts.accept(named("r2"), DEFAULT_BOUNDS)).request_id == "r2"


async def test_key_is_free_again_when_its_request_failed(scripts: Scripts) -> None:
    await scripts.register(make.registration("w1"))
    await scripts.accept(named("r1"), DEFAULT_BOUNDS)
    await scripts.form("w1", "c1", ["r1"])
    await scripts.finish("w1", RowFinish(Assignment("r1", 1), -1, "failed", "engine", Failed("r1", "engine", "no")))

    assert (await scripts.accept(named("r2"), DEFAULT_BOUNDS)).request_id == "r2"


async def test_cancel_of_the_unwanted_spares_a_request_that_is_kept(scripts: Scripts) -> None:
    await scripts.accept(named("r1"), DEFAULT_BOUNDS)
    await scripts.keep("r1", 60_000)

    assert await scripts.cancel("r1", "listener", if_unwanted=True) == "wanted"
    assert await scripts.keep("r1", 60_000) == "waiting"


async def test_cancel_of_the_unwanted_ends_a_request_that_nobody_keeps(scripts: Scripts) -> None:
    await scripts.accept(named("r1"), DEFAULT_BOUNDS)
    await scripts.keep("r1", 0)

    assert await scripts.cancel("r1", "listener", if_unwanted=True) == "cancelled"


async def test_keep_makes_no_record_of_a_request_that_is_not_there(scripts: Scripts, client: Redis) -> None:
    assert await scripts.keep("r1", 60_000) == ""
    assert await client.exists(keys.state("r1")) == 0


async def test_accept_lists_an_interactive_request_with_its_listener_alone(scripts: Scripts, client: Redis) -> None:
    reply, ids = keys.reply("api-1"), keys.listening("api-1")
    await scripts.accept(make.submission("r1", reply=reply), DEFAULT_BOUNDS)
    await scripts.accept(named("kept", reply=reply), DEFAULT_BOUNDS)
    offline = make.submission("off", ticket=make.ticket("off", priority="offline"), reply=reply)
    await scripts.accept(offline, DEFAULT_BOUNDS)

    listed = await client.smembers(ids)
    await scripts.cancel("r1", "listener")

    assert listed == {b"r1"}
    assert await client.exists(ids) == 0
