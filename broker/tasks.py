"""Ending asyncio tasks for certain."""

from __future__ import annotations

import asyncio
from typing import Any

AGAIN_S = 0.2


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they are done, whatever they end with.

    One cancellation is not enough: where it meets a reply that has just arrived, the time-out code of Python 3.11
    and of client libraries may swallow it, and the task goes on.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN_S)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # seen, so that the loop does not report it as lost
