"""Repeats a daemon's steps beside each other, waits out a Redis that is away, and keeps the first failure."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from broker import tasks
from broker.errors import BrokerUnavailableError

logger = logging.getLogger(__name__)

RETRY_MIN_S, RETRY_MAX_S = 0.05, 1.0

Step = Callable[[], Awaitable[None]]


class StepRunner:
    """Named tasks. What one of them fails with is raised to whoever waits through the crew."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failure: Exception | None = None
        self._failed = asyncio.Event()

    def fail(self, error: Exception) -> None:
        """Record why the daemon cannot go on; the first reason stays."""
        if self._failure is None:
            self._failure = error
        self._failed.set()

    def repeat(self, name: str, step: Step, *, retry_max_s: float = RETRY_MAX_S) -> None:
        """Run a step over and over; `retry_max_s` is how long it waits at most before it tries Redis again."""
        self._tasks[name] = asyncio.create_task(self._repeat(name, step, retry_max_s), name=f"worker-{name}")

    async def dismiss(self, name: str) -> None:
        """End one task, if there is one of this name."""
        task = self._tasks.pop(name, None)
        if task is not None:
            await tasks.end(task)

    async def dismiss_all(self) -> None:
        for name in list(self._tasks):
            await self.dismiss(name)

    async def first(
        self, work: Coroutine[Any, Any, object], *others: Coroutine[Any, Any, object], timeout_s: float | None = None
    ) -> bool:
        """Wait for the first of several; whether it was `work`. The rest is cancelled.

        Raises:
            Exception: what a task of this crew, or the first one here, failed with.
        """
        waiting = [asyncio.ensure_future(each) for each in (work, *others, self._failed.wait())]
        try:
            done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await tasks.end(*waiting)
        if self._failure is not None:
            raise self._failure
        for task in done:
            task.result()
        return waiting[0] in done

    async def _repeat(self, name: str, step: Step, retry_max_s: float) -> None:
        try:
            while True:
                await persist(step, retry_max_s=retry_max_s)
        except Exception as error:
            logger.exception("the step %s failed", name)
            self.fail(error)


async def persist(step: Step, *, retry_max_s: float = RETRY_MAX_S) -> None:
    """Run a step until Redis lets it, waiting longer and longer in between."""
    delay_s = RETRY_MIN_S
    while True:
        try:
            return await step()
        except BrokerUnavailableError as error:
            log = logger.warning if delay_s == RETRY_MIN_S else logger.debug
            log("waiting for Redis: %s", error)
        await asyncio.sleep(min(delay_s, retry_max_s))
        delay_s = min(delay_s * 2, RETRY_MAX_S)
