"""What an RQ job of a batch does: connect, run the batch until it is over or somebody says stop, close.

RQ finds `run_batch` by its path; what it needs to know of this process comes through `CURRENT`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from rq import Retry

from api.batch.file_store import FileStore
from api.batch.progress import Tools
from api.batch.queue import RETRIES
from api.batch.runner import BatchRunner, RunEnd, RunnerLimits
from api.calls.client import TextClient
from broker.batches import BatchDesk
from broker.client.client import Client
from broker.errors import BrokerUnavailableError
from broker.wire import new_id

logger = logging.getLogger(__name__)

CONNECT_AGAIN_S = 0.5


@dataclass(frozen=True, slots=True)
class JobContext:
    """The worker process that a job runs in."""

    redis_url: str
    store: FileStore
    limits: RunnerLimits
    on_start: Callable[[Callable[[], None]], None]
    """Told how to stop what runs, from any thread or signal handler."""


CURRENT: ContextVar[JobContext] = ContextVar("batch_job_context")


def run_batch(batch_id: str) -> str | Retry:
    """The RQ job: how it ended, or that RQ shall run it again."""
    end = asyncio.run(_run(batch_id, CURRENT.get()))
    if end == "over":
        return end
    # Stopped with this process, or another runner has it, which may die: either way it must be looked at again.
    logger.info("batch %s: %s; queued again", batch_id, end)
    return Retry(max=RETRIES, enqueue_at_front=True)


async def _run(batch_id: str, context: JobContext) -> RunEnd:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask_to_stop() -> None:
        loop.call_soon_threadsafe(stop.set)

    context.on_start(ask_to_stop)
    client = await _connect(context.redis_url, stop)
    if client is None:
        return "stopped"
    async with TextClient(client) as text:
        tools = Tools(text, BatchDesk(client.commands), context.store)
        record = await tools.desk.batch(batch_id)
        if record is None or record.is_over:
            return "over"
        runner = BatchRunner(record, tools, context.limits, runner=new_id("runner"))
        running = asyncio.create_task(runner.run(), name="batch-run")
        stopping = asyncio.create_task(stop.wait(), name="batch-stop")
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            runner.stop()
        stopping.cancel()
        return await running


async def _connect(redis_url: str, stop: asyncio.Event) -> Client | None:
    """None when told to stop before Redis answered."""
    while not stop.is_set():
        try:
            return await Client.open(redis_url)
        except BrokerUnavailableError:
            await asyncio.sleep(CONNECT_AGAIN_S)
    return None
