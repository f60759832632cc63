"""Every daemon is restarted in turn under load; clients notice delay only. Real processes; engine: scripted."""

from __future__ import annotations

import asyncio
import signal

import httpx

from harness.announcements import Told, listen
from harness.balancer import Balancer
from harness.stack import Stack, wait_until

LENGTHS = (1, 20, 60, 200)
CLIENTS = 6
ENDS_WITHIN_S = 60.0


async def test_rolling_restart_of_every_daemon_loses_nothing() -> None:
    stack = Stack(formers=2, workers=2, apis=2)
    stack.arguments["worker"] = ("--engine", "scripted", "--script-step-s", "0.01", "--grace-s", "1")
    stack.arguments["api"] = ("--drain-notice-s", "1", "--drain-s", "20")
    told: list[Told] = []
    is_over = asyncio.Event()
    await asyncio.to_thread(stack.start)
    try:
        async with Balancer(list(stack.ports.values())) as balancer:
            clients = [asyncio.create_task(_keep_asking(balancer, told, index, is_over)) for index in range(CLIENTS)]
            codes = await asyncio.to_thread(_restart_all, stack)
            is_over.set()
            await asyncio.gather(*clients)
        leaks = stack.leaks()
    finally:
        await asyncio.to_thread(stack.stop)

    assert [str(each) for each in told if not each.is_right] == []
    assert len(told) > 3 * CLIENTS
    assert set(codes.values()) == {0}
    assert leaks == []


async def _keep_asking(balancer: Balancer, told: list[Told], index: int, is_over: asyncio.Event) -> None:
    """One client, one connection for each request."""
    count = 0
    while not is_over.is_set():
        mine = Told(f"client {index} asks {count}", LENGTHS[(index + count) % len(LENGTHS)])
        told.append(mine)
        count += 1
        async with httpx.AsyncClient(
            verify=False, base_url=balancer.url, timeout=60, headers={"connection": "close"}
        ) as http:
            await listen(http, mine)


def _restart_all(stack: Stack) -> dict[str, int]:
    """One after the other, the next when the last one is ready; returns what each ended with."""
    codes = {}
    for name in [name for name in stack.processes if name != "redis"]:
        stack.signal(name, signal.SIGTERM)
        codes[name] = stack.processes[name].wait(ENDS_WITHIN_S)
        stack.start_one(name)
        wait_until(stack.is_ready, f"{name} is ready again", timeout_s=ENDS_WITHIN_S, on_timeout=stack.logs)
    return codes
