"""One API, one former and two workers as separate processes: nothing lost, whoever dies. Scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from broker import keys
from broker.client.client import Client
from broker.wire import Finished
from harness.scripted import Ask, Heard, ask, hear
from harness.stack import Stack, wait_until


async def submit_all(client: Client, asks: Sequence[Ask]) -> list[Heard]:
    handles = [await client.submit(each.request, each.ticket) for each in asks]
    return await asyncio.gather(*(hear(handle) for handle in handles))


async def owners(client: Client, asks: Sequence[Ask]) -> list[str]:
    """The worker that has each request now; empty for those that wait or have ended."""
    raw: list[Any] = [await client.commands.hget(keys.state(each.request.id), "owner") for each in asks]
    return [owner.decode() if owner else "" for owner in raw]


async def test_sixty_four_requests_end_once_with_every_token_right(client: Client) -> None:
    asks = [ask(f"request {i} " + "x" * (7 * i % 90), 20 + i % 17) for i in range(64)]
    ended_before = sum((await client.registry.ended()).values())

    heard = await submit_all(client, asks)

    assert [each.tokens for each in heard] == [each.expected for each in asks]
    assert all(isinstance(each.end, Finished) and each.end.reason == "length" for each in heard)
    assert sum((await client.registry.ended()).values()) - ended_before == 64
    load = await client.registry.load()
    assert set(load.requests.values()) == {0}
    assert set(load.tokens.values()) == {0}


async def test_both_workers_work_when_there_is_enough_for_both(client: Client) -> None:
    asks = [ask(f"both {i}", 60) for i in range(16)]
    handles = [await client.submit(each.request, each.ticket) for each in asks]
    readers = [asyncio.create_task(hear(handle)) for handle in handles]
    seen: set[str] = set()

    while not all(reader.done() for reader in readers):
        seen |= set(await owners(client, asks)) - {""}
        await asyncio.sleep(0.01)

    assert len(seen) == 2
    assert [reader.result().tokens for reader in readers] == [each.expected for each in asks]


async def test_stream_goes_on_with_exact_tokens_when_its_worker_is_killed(client: Client, stack: Stack) -> None:
    asks = [ask(f"killed {i}", 400) for i in range(12)]
    handles = [await client.submit(each.request, each.ticket) for each in asks]
    readers = [asyncio.create_task(hear(handle)) for handle in handles]
    while min([await client.commands.strlen(keys.log(each.request.id)) for each in asks[:6]]) < 30 * 4:
        await asyncio.sleep(0.01)

    stack.kill("worker-0")
    heard = await asyncio.gather(*readers)

    assert [each.tokens for each in heard] == [each.expected for each in asks]
    assert all(isinstance(each.end, Finished) for each in heard)
    attempts = [int(await client.commands.hget(keys.state(each.request.id), "attempt") or 0) for each in asks]
    assert max(attempts) == 2, "no request was on the worker that was killed"
    stack.start_one("worker-0")
    wait_until(lambda: stack.accepting_workers() == 2, "two workers accept again", on_timeout=stack.logs)


async def test_every_key_left_behind_expires_or_is_permanent(client: Client) -> None:
    await submit_all(client, [ask("a key", 5)])

    left = [key.decode() async for key in client.commands.scan_iter()]

    assert [key for key in left if not keys.is_permanent(key) and await client.commands.ttl(key) < 0] == []
