"""What happens to the requests of an API process that died. Engine: none; Redis: all three servers."""

from __future__ import annotations

from redis.asyncio import Redis

from broker import keys
from broker.former.daemon import Former
from broker.scripts import DEFAULT_BOUNDS, Registration, Scripts
from broker.wire import Finished
from harness import factories as make
from harness.clock import FakeClock
from harness.reads import read_end, read_status
from harness.running import accept

LEASE_S = 60.0
API = "api-1"


async def let_it_die(former: Former, clock: FakeClock) -> None:
    for _ in range(7):
        await former.step()
        clock.advance(LEASE_S / 5)
    await former.step()


async def test_former_cancels_what_a_dead_api_process_alone_waited_for(
    former: Former, scripts: Scripts, client: Redis, clock: FakeClock
) -> None:
    await scripts.register(Registration(API, {"kind": "api"}))
    await scripts.accept(make.submission("mine", reply=keys.reply(API)), DEFAULT_BOUNDS)
    offline = make.submission("off", ticket=make.ticket("off", priority="offline"), reply=keys.reply(API))
    await scripts.accept(offline, DEFAULT_BOUNDS)
    await accept(scripts, "other")

    await let_it_die(former, clock)

    assert await read_end(client, "mine") == Finished("mine", "cancelled", 0, -1, "listener")
    assert [await read_status(client, name) for name in ("off", "other")] == ["waiting", "waiting"]
    assert await client.exists(keys.listening(API), keys.daemon(API)) == 0


async def test_former_asks_the_worker_to_end_what_runs_for_a_dead_api_process(
    former: Former, scripts: Scripts, client: Redis, clock: FakeClock
) -> None:
    await scripts.register(Registration(API, {"kind": "api"}))
    await scripts.register(make.registration("w1"))
    await scripts.accept(make.submission("mine", reply=keys.reply(API)), DEFAULT_BOUNDS)
    for _ in range(7):
        await scripts.beat("w1", {})
        await former.step()
        clock.advance(LEASE_S / 5)
    await former.step()

    assert await client.hget(keys.state("mine"), "cancel") == b"listener"
    assert await read_status(client, "mine") == "running"
