"""Waits for something to become true, for tests with real tasks or processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

POLL_S = 0.01
PATIENCE_S = 60.0
"""How long an event may take before it counts as hung, on a machine that has far more to do than it can."""


async def wait_until(is_true: Callable[[], Awaitable[bool]], what: str, *, timeout_s: float = PATIENCE_S) -> None:
    """Raises: AssertionError when it does not become true in time."""
    end = time.monotonic() + timeout_s
    while not await is_true():
        assert time.monotonic() < end, f"not in {timeout_s} s: {what}"
        await asyncio.sleep(POLL_S)
