"""An event loop on a thread of its own, so that programs without one can use what needs one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_END = object()


class LoopThread:
    """Runs coroutines for callers on other threads; end it with `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """The result of a coroutine.

        Raises:
            TimeoutError: it took longer than `timeout_s` and was cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(_within(work, timeout_s), self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """The items of an asynchronous iterator, as they come."""
        while (item := self.run(_next(items))) is not _END:
            yield item  # type: ignore[misc]  # everything but the mark of the end is an item

    def close(self) -> None:
        """Stop the loop; what still runs on it is cancelled."""
        self.run(_cancel_rest())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


async def _within(work: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
    async with asyncio.timeout(timeout_s):
        return await work


async def _next(items: AsyncIterator[T]) -> T | object:
    try:
        return await anext(items)
    except StopAsyncIteration:
        return _END


async def _cancel_rest() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
