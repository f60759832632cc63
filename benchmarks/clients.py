"""Streaming clients for the benchmarks: what they asked for, when each token came."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx

PROMPTS = (
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "List five ways to save water at home, one line each.",
    "What is the difference between a lake and a sea?",
    "Write a Python function that returns the n-th Fibonacci number and explain it.",
    "Summarise the causes of the First World War in a few sentences.",
    "Give me a recipe for a simple tomato soup.",
    "Why is the sky blue at noon and red in the evening?",
)


class Answer(NamedTuple):
    """One streamed answer."""

    tokens: int
    first_token_s: float
    """From sending the request to the first content."""
    total_s: float
    text: str


class Round(NamedTuple):
    """All clients of one round."""

    answers: tuple[Answer, ...]
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.wall_s

    @property
    def mean_first_token_s(self) -> float:
        return sum(answer.first_token_s for answer in self.answers) / len(self.answers)


def chat_body(prompt: str, *, model: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy, streamed chat request that reports usage."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


async def run_round(url: str, bodies: Sequence[dict[str, Any]]) -> Round:
    """Send all bodies at once to `url`/v1/chat/completions and read every stream to its end."""
    return await run_clients(url, [[body] for body in bodies])


async def run_clients(url: str, clients: Sequence[Sequence[dict[str, Any]]]) -> Round:
    """All clients at once, each of which sends its bodies one after another."""
    limits = httpx.Limits(max_connections=len(clients))

    async def ask(bodies: Sequence[dict[str, Any]]) -> list[Answer]:
        return [await stream_answer(http, body) for body in bodies]

    async with httpx.AsyncClient(trust_env=False, base_url=url, timeout=600, limits=limits) as http:
        started = time.perf_counter()
        answers = await asyncio.gather(*map(ask, clients))
        return Round(tuple(itertools.chain(*answers)), time.perf_counter() - started)


async def stream_answer(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """Read one stream.

    Raises:
        RuntimeError: the server answered with an error, before or within the stream.
    """
    started = time.perf_counter()
    first_s, tokens, parts = 0.0, 0, []
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RuntimeError(str(chunk["error"]))
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
            if chunk["choices"] and (text := chunk["choices"][0]["delta"].get("content")):
                first_s = first_s or time.perf_counter() - started
                parts.append(text)
    return Answer(tokens, first_s, time.perf_counter() - started, "".join(parts))
