"""Hundreds of calls at one API process at once, over few connections to Redis. Engine: scripted; real processes."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx

from harness.announcements import body_of
from harness.stack import Stack

CALLS = 200


async def test_every_call_of_a_burst_is_answered() -> None:
    stack = Stack()
    stack.arguments["worker"] = ("--engine", "scripted", "--decode-batch-max", "32")
    stack.arguments["api"] = ("--redis-connections", "4")
    await asyncio.to_thread(stack.start)
    try:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=stack.url, timeout=120, limits=limits) as http:
            bodies = [body_of(f"burst {i}", 3, stream=i % 2 == 0) for i in range(CALLS)]
            answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
    finally:
        await asyncio.to_thread(stack.stop)

    assert Counter(answer.status_code for answer in answers) == {200: CALLS}
    assert not [answer.text for answer in answers if '"error"' in answer.text]
