"""Many readers over few connections, whose subscription is killed again and again. Engine: none; Redis: redis.

The readers never look by themselves: what they hear, they hear because the subscription came back.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from broker import keys
from broker.client.client import Client
from broker.client.results import wait
from broker.connection.connect import connect
from broker.scripts import RowCommit, RowFinish, Scripts
from broker.wire import Assignment, Finished, pack_tokens
from harness import factories as make
from harness.wait import wait_until
from tests.broker.conftest import ChildServers

READERS, KILLS = 60, 5
NEVER_S = 3600.0


async def test_readers_hear_everything_however_often_their_subscription_is_killed(child_servers: ChildServers) -> None:
    server = child_servers.get("redis")
    server.flush()
    commands: Any = server.client()
    listener = await Client.over(
        connect(server.url, connections=2), server.client(blocking=True), silence_s=NEVER_S, pulse=server.client()
    )
    scripts, ids = Scripts(commands), [f"r{i}" for i in range(READERS)]
    await scripts.register(make.registration("w1", lane=make.lane(decode_batch_max=READERS)))
    handles = [await listener.submit(make.request(each), make.ticket(each)) for each in ids]
    await scripts.form("w1", "c1", ids)
    readers = [asyncio.create_task(wait(handle)) for handle in handles]

    for position in range(KILLS):
        await commands.client_kill_filter(_type="pubsub")
        rows = [RowCommit(Assignment(each, 1), position, pack_tokens([position])) for each in ids]
        await scripts.commit("w1", rows, {})
        await wait_until(lambda: is_subscribed(commands, listener), "the subscription is back")
    await commands.client_kill_filter(_type="pubsub")
    for each in ids:
        end = Finished(each, "length", KILLS)
        await scripts.finish("w1", RowFinish(Assignment(each, 1), KILLS, "finished", "length", end))

    outcomes = await asyncio.wait_for(asyncio.gather(*readers), 60)
    assert {outcome.tokens for outcome in outcomes} == {tuple(range(KILLS))}
    assert all(isinstance(outcome.end, Finished) for outcome in outcomes)
    await listener.close()
    await commands.aclose()


async def is_subscribed(commands: Any, listener: Client) -> bool:
    [(_, count)] = await cast("Any", commands).pubsub_numsub(keys.reply(listener.id))
    return bool(count)
