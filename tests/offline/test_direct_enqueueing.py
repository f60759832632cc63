"""Programs that enqueue token ids themselves, waiting or not. Engine: scripted, in a process of its own."""

from __future__ import annotations

import pytest

from broker.client import results as outcomes
from broker.client.client import Client
from broker.client.sync import SyncClient
from broker.errors import ConflictError, UnknownRequestError
from broker.scripts import Idempotency
from broker.wire import Finished, Tokens
from harness.scripted import ask
from harness.stack import Stack
from harness.wait import PATIENCE_S, wait_until


async def test_result_is_read_later_by_id_without_ever_having_listened(client: Client, offline_stack: Stack) -> None:
    asked = ask("nobody listens", 12, priority="offline")
    accepted = await client.enqueue(asked.request, asked.ticket)

    async def is_over() -> bool:
        return (await outcomes.look(client, accepted.request_id)).is_over

    await wait_until(is_over, "the request has ended")
    later = await Client.open(offline_stack.redis_url)
    outcome = await outcomes.look(later, asked.request.id)
    await later.close()

    assert outcome.tokens == asked.expected
    assert isinstance(outcome.end, Finished)


async def test_attached_reader_gets_every_token_of_a_request_another_program_enqueued(client: Client) -> None:
    asked = ask("attached", 40, priority="offline")
    await client.enqueue(asked.request, asked.ticket)

    outcome = await outcomes.wait(client.attach(asked.request.id))

    assert outcome.tokens == asked.expected


async def test_request_enqueued_twice_under_its_id_runs_once(client: Client) -> None:
    asked = ask("twice", 10, priority="offline")

    first = await client.enqueue(asked.request, asked.ticket)
    again = await client.submit(asked.request, asked.ticket)

    assert (first.is_new, again.accepted.is_new) == (True, False)
    assert (await outcomes.wait(again)).tokens == asked.expected


async def test_idempotency_key_leads_to_the_first_request(client: Client) -> None:
    one, other = ask("same", 9, priority="offline"), ask("same", 9, priority="offline")
    name = Idempotency("direct-enqueueing-1")
    await client.enqueue(one.request, one.ticket, idempotency=name)

    handle = await client.submit(other.request, other.ticket, idempotency=name)

    assert handle.request_id == one.request.id
    assert (await outcomes.wait(handle)).tokens == one.expected


async def test_idempotency_key_of_another_body_is_refused(client: Client) -> None:
    one, other = ask("this", 9, priority="offline"), ask("that", 9, priority="offline")
    name = Idempotency("direct-enqueueing-2")
    await client.enqueue(one.request, one.ticket, idempotency=name)

    with pytest.raises(ConflictError):
        await client.enqueue(other.request, other.ticket, idempotency=name)


async def test_record_is_gone_after_its_time_to_live(client: Client) -> None:
    asked = ask("short-lived", 3, priority="offline")
    await client.enqueue(asked.request, asked.ticket, retain_ms=1)

    async def is_gone() -> bool:
        return (await client.read(asked.request.id)).status is None

    await wait_until(is_gone, "the record has expired")
    with pytest.raises(UnknownRequestError):
        await outcomes.look(client, asked.request.id)


def test_program_without_an_event_loop_submits_streams_and_looks_back(offline_stack: Stack) -> None:
    asked = ask("blocking", 25, priority="offline")
    with SyncClient.open(offline_stack.redis_url) as client:
        events = list(client.submit(asked.request, asked.ticket).events())
        outcome = client.look(asked.request.id)

    assert sum(len(event.tokens) // 4 for event in events if isinstance(event, Tokens)) == 25
    assert isinstance(events[-1], Finished)
    assert outcome.tokens == asked.expected


def test_program_without_an_event_loop_cancels_what_it_enqueued(offline_stack: Stack) -> None:
    asked = ask("cancelled", 2000, priority="offline")
    with SyncClient.open(offline_stack.redis_url) as client:
        client.enqueue(asked.request, asked.ticket)
        client.cancel(asked.request.id)
        outcome = client.attach(asked.request.id).wait(timeout_s=PATIENCE_S)

    assert isinstance(outcome.end, Finished)
    assert outcome.end.reason == "cancelled"


def test_wait_of_a_program_without_an_event_loop_ends_at_its_limit(offline_stack: Stack) -> None:
    asked = ask("too long", 2000, priority="offline")
    with SyncClient.open(offline_stack.redis_url) as client:
        handle = client.submit(asked.request, asked.ticket)
        with pytest.raises(TimeoutError):
            handle.wait(timeout_s=0.05)
        handle.cancel()
