"""What a client hears: in order, without holes, once, whatever is lost. Engine: none; Redis: all three servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from redis.asyncio import Redis

from broker import keys
from broker.client.client import Client
from broker.client.handle import GIVE_UP_S, OVERDUE_S, Handle, tokens_of
from broker.client.replies import Inbox
from broker.errors import BrokerUnavailableError, QueueFullError
from broker.scripts import DEFAULT_BOUNDS, Accepted, Bounds, Idempotency, RowCommit, RowFinish, Scripts
from broker.wire import Assignment, Event, Failed, Finished, Tokens, encode_events, pack_tokens
from harness import factories as make
from harness.redis_servers import ChildServer, InProcessRedis, Server
from harness.wait import PATIENCE_S
from tests.broker.conftest import ChildServers

SILENCE_S = 0.1
SEAT = Assignment("r1", 1)


@pytest.fixture
async def listener(server: Server, client: Redis) -> AsyncIterator[Client]:
    listener = await Client.over(server.client(), server.client(blocking=True), silence_s=SILENCE_S)
    yield listener
    await listener.close()


async def submit(listener: Client, request_id: str = "r1") -> Handle:
    return await listener.submit(make.request(request_id), make.ticket(request_id))


async def start(listener: Client, scripts: Scripts) -> Handle:
    """A request that runs on `w1`."""
    handle = await submit(listener)
    await scripts.register(make.registration("w1"))
    await scripts.form("w1", "c1", ["r1"])
    return handle


async def commit(scripts: Scripts, listener: Client, position: int, tokens: Sequence[int]) -> None:
    """Tokens that are committed and told."""
    await write(scripts, position, tokens)
    await tell(scripts, listener, Tokens("r1", position, pack_tokens(tokens)))


async def write(scripts: Scripts, position: int, tokens: Sequence[int]) -> None:
    """Tokens whose message is lost."""
    await scripts.commit("w1", [RowCommit(SEAT, position, pack_tokens(tokens))], {})


async def tell(scripts: Scripts, listener: Client, event: Event) -> None:
    await scripts.commit("w1", [], {keys.reply(listener.id): encode_events([event])})


async def finish(scripts: Scripts, length: int) -> None:
    await scripts.finish("w1", RowFinish(SEAT, length, "finished", "length", Finished("r1", "length", length)))


async def hear(handle: Handle) -> tuple[list[int], Event]:
    """All tokens, checked to be without holes, and the end."""
    tokens: list[int] = []
    async for event in handle.events():
        if not isinstance(event, Tokens):
            return tokens, event
        assert event.position == len(tokens)
        tokens += tokens_of(event)
    raise AssertionError("no end")


async def test_reader_gets_tokens_as_they_come_and_one_end(listener: Client, scripts: Scripts) -> None:
    handle = await start(listener, scripts)
    await commit(scripts, listener, 0, [5, 6])
    await commit(scripts, listener, 2, [7])
    await finish(scripts, 3)

    assert await hear(handle) == ([5, 6, 7], Finished("r1", "length", 3))
    assert listener.open_requests == 0


async def test_reader_gets_what_a_lost_message_carried_when_the_next_one_comes(
    listener: Client, scripts: Scripts
) -> None:
    handle = await start(listener, scripts)
    await write(scripts, 0, [5, 6])
    await commit(scripts, listener, 2, [7])
    await finish(scripts, 3)

    assert await hear(handle) == ([5, 6, 7], Finished("r1", "length", 3))


async def test_reader_gets_what_a_lost_message_carried_before_the_end_that_follows_it(
    listener: Client, scripts: Scripts
) -> None:
    handle = await start(listener, scripts)
    await commit(scripts, listener, 0, [5])
    await write(scripts, 1, [6, 7])
    await finish(scripts, 3)

    assert await hear(handle) == ([5, 6, 7], Finished("r1", "length", 3))


async def test_reader_gets_a_repeated_message_once(listener: Client, scripts: Scripts) -> None:
    handle = await start(listener, scripts)
    await commit(scripts, listener, 0, [5, 6])
    await commit(scripts, listener, 0, [5, 6])
    await commit(scripts, listener, 1, [6, 7])
    await finish(scripts, 3)

    assert await hear(handle) == ([5, 6, 7], Finished("r1", "length", 3))


async def test_reader_gets_the_end_when_the_last_message_was_lost(
    listener: Client, scripts: Scripts, client: Redis
) -> None:
    handle = await start(listener, scripts)
    await client.hset(keys.state("r1"), "reply", "")
    await write(scripts, 0, [5])
    await finish(scripts, 1)

    assert await hear(handle) == ([5], Finished("r1", "length", 1))


async def test_reader_gets_every_token_when_it_was_slower_than_its_buffer(listener: Client, scripts: Scripts) -> None:
    handle = await start(listener, scripts)
    tokens = [i % 250 for i in range(1500)]
    await write(scripts, 0, tokens)
    inbox_events = [Tokens("r1", i, pack_tokens([token])) for i, token in enumerate(tokens)]
    await scripts.commit("w1", [], {keys.reply(listener.id): encode_events(inbox_events)})
    await finish(scripts, len(tokens))

    assert await hear(handle) == (tokens, Finished("r1", "length", 1500))


async def test_reader_hears_of_other_tokens_than_it_was_shown_as_an_error(
    listener: Client, scripts: Scripts, client: Redis
) -> None:
    handle = await start(listener, scripts)
    events = handle.events()
    await commit(scripts, listener, 0, [5, 6])
    shown = await anext(events)

    await tell(scripts, listener, Tokens("r1", 1, pack_tokens([9])))

    assert isinstance(shown, Tokens)
    assert [type(event).__name__ + ":" + getattr(event, "code", "") async for event in events] == ["Failed:diverged"]


async def test_reader_hears_that_redis_has_forgotten_the_request(
    listener: Client, scripts: Scripts, client: Redis
) -> None:
    handle = await start(listener, scripts)
    await client.flushall()

    tokens, end = await hear(handle)

    assert tokens == []
    assert isinstance(end, Failed)
    assert end.code == "lost"


async def test_attached_reader_gets_a_request_of_somebody_else_from_its_first_token(
    listener: Client, scripts: Scripts
) -> None:
    await start(listener, scripts)
    await write(scripts, 0, [5, 6])
    attached = listener.attach("r1")
    reading = asyncio.create_task(hear(attached))
    await write(scripts, 2, [7])
    await finish(scripts, 3)

    assert await reading == ([5, 6, 7], Finished("r1", "length", 3))


async def test_submit_of_a_known_idempotency_key_reads_the_older_request(listener: Client, scripts: Scripts) -> None:
    name = Idempotency("once")
    request, ticket = make.request("r1"), make.ticket("r1")
    await listener.submit(request, ticket, idempotency=name)
    await scripts.register(make.registration("w1"))
    await scripts.form("w1", "c1", ["r1"])
    await write(scripts, 0, [5])
    await finish(scripts, 1)
    again, its_ticket = make.request("r2"), make.ticket("r2")

    handle = await listener.submit(again, its_ticket, idempotency=name)

    assert handle.request_id == "r1"
    assert await hear(handle) == ([5], Finished("r1", "length", 1))


async def test_submit_leaves_nothing_behind_when_it_is_refused(server: Server, client: Redis) -> None:
    bounds = Bounds(requests=0)
    listener = await Client.over(server.client(), server.client(blocking=True), bounds=bounds)

    with pytest.raises(QueueFullError):
        await submit(listener)

    assert listener.open_requests == 0
    await listener.close()


async def test_abandon_ends_a_request_that_waits(listener: Client, scripts: Scripts, client: Redis) -> None:
    handle = await submit(listener)

    await handle.abandon()

    assert await client.hget(keys.state("r1"), "cancel") == b"client"
    assert await client.xlen(keys.WAIT_INTERACTIVE) == 0


class LosesReplies(InProcessRedis):
    """Runs every command and loses the reply of those that are told to be lost."""

    is_losing = False

    async def execute_command(self, *args: object, **options: object) -> object:
        reply = await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        if self.is_losing:
            raise ConnectionResetError("the reply was lost")
        return reply


async def test_request_whose_acceptance_was_not_heard_is_cancelled_later() -> None:
    commands = LosesReplies()
    subscriber = InProcessRedis(server=commands.connection_pool.connection_kwargs["server"])
    listener = await Client.over(commands, subscriber)
    await submit(listener, "before")
    commands.is_losing = True
    with pytest.raises(BrokerUnavailableError):
        await submit(listener)
    commands.is_losing = False

    await listener.cancel_orphans()

    assert await commands.hget(keys.state("r1"), "status") == b"cancelled"
    await listener.close()


async def test_offline_request_whose_acceptance_was_not_heard_is_there_when_it_is_submitted_again() -> None:
    commands = LosesReplies()
    subscriber = InProcessRedis(server=commands.connection_pool.connection_kwargs["server"])
    listener = await Client.over(commands, subscriber)
    request, ticket = make.request("r1"), make.ticket("r1", priority="offline")
    await submit(listener, "before")
    commands.is_losing = True
    with pytest.raises(BrokerUnavailableError):
        await listener.submit(request, ticket)
    commands.is_losing = False
    again = await listener.submit(request, ticket)

    await listener.cancel_orphans()

    assert not again.accepted.is_new
    assert await commands.hget(keys.state("r1"), "status") == b"waiting"
    await listener.close()


@pytest.mark.parametrize("name", ["valkey", "redis"])
async def test_reader_gets_everything_when_its_subscription_was_cut(name: str, child_servers: ChildServers) -> None:
    child = child_servers.get(name)  # type: ignore[arg-type]  # a literal by parametrisation
    assert isinstance(child, ChildServer)
    child.flush()
    commands = child.client()
    scripts = Scripts(commands)
    listener = await Client.over(child.client(), child.client(blocking=True), silence_s=60)
    handle = await start(listener, scripts)
    reading = asyncio.create_task(hear(handle))
    await commit(scripts, listener, 0, [5])
    await commands.client_kill_filter(_type="pubsub")
    await write(scripts, 1, [6])
    await finish(scripts, 2)

    async with asyncio.timeout(PATIENCE_S):
        assert await reading == ([5, 6], Finished("r1", "length", 2))
    await listener.close()
    await commands.aclose()


async def test_process_registers_anew_when_it_was_declared_dead(listener: Client, scripts: Scripts) -> None:
    await scripts.retire(listener.id)

    await listener.beat()

    assert [record.id for record in await listener.registry.daemons()] == [listener.id]


async def test_same_submission_twice_gives_the_same_answer(listener: Client, scripts: Scripts) -> None:
    request = make.request("r1")
    first = await listener.submit(request, make.ticket("r1"))
    second = await listener.submit(request, make.ticket("r1"))

    assert (first.accepted.is_new, second.accepted.is_new) == (True, False)
    assert first.request_id == second.request_id == "r1"


async def test_reader_ends_a_request_that_nobody_ends_at_its_deadline(client: Redis, listener: Client) -> None:
    handle = await listener.submit(make.request(), make.ticket(), timeout_ms=-int(1000 * OVERDUE_S))

    events = [event async for event in handle.events()]

    assert events == [Finished("r1", "deadline", 0, -1, "deadline")]


async def test_reader_hears_of_a_running_request_long_past_its_deadline_as_an_error(
    client: Redis, scripts: Scripts, listener: Client
) -> None:
    await scripts.register(make.registration("w1"))
    await scripts.accept(make.submission("r1"), DEFAULT_BOUNDS)
    await scripts.form("w1", "c1", ["r1"])
    due_s = asyncio.get_running_loop().time() - GIVE_UP_S
    handle = Handle(listener, Accepted(1, True, "r1"), Inbox(), silence_s=SILENCE_S, has_logprobs=False, due_s=due_s)

    [end] = [event async for event in handle.events()]

    assert isinstance(end, Failed)
    assert end.code == "deadline_exceeded"
