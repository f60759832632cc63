"""What the queue can carry: an engine that answers at once, so that everything measured is ours.

`python -m benchmarks.broker [--quick] [--json]`. Prints requests/s of one-token requests, tokens/s of long streams,
and the processor time each daemon spent on them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import NamedTuple

import click
import httpx
import psutil

from benchmarks.clients import chat_body, run_round, stream_answer
from benchmarks.ratios import report
from harness.stack import Stack

STREAMS = 32
ROWS = 32


class Figures(NamedTuple):
    """One measured stretch."""

    per_s: float
    cpu_us: Mapping[str, float]
    """Processor microseconds per request or token, by daemon."""


@click.command()
@click.option("--quick", is_flag=True)
@click.option("--json", "as_json", is_flag=True)
def main(*, quick: bool, as_json: bool) -> None:
    """Measure."""
    requests, tokens = (300, 256) if quick else (2000, 1024)
    stack = Stack()
    stack.arguments["worker"] = ("--engine", "scripted", "--decode-batch-max", str(ROWS))
    with stack:
        model = httpx.get(f"{stack.url}/v1/models", trust_env=False).json()["data"][0]["id"]
        short = measure_requests(stack, model, requests)
        long = measure_tokens(stack, model, tokens)
    lines = [
        f"{requests} one-token requests, {STREAMS} at once: {short.per_s:.0f} requests/s",
        _profile(short, "request"),
        f"{STREAMS} streams of {tokens} tokens: {long.per_s:.0f} tokens/s",
        _profile(long, "token"),
    ]
    result = {"requests_per_s": short.per_s, "tokens_per_s": long.per_s}
    result["cpu_us_per_request"], result["cpu_us_per_token"] = short.cpu_us, long.cpu_us  # type: ignore[assignment]
    report(lines, result, as_json=as_json)


def measure_requests(stack: Stack, model: str, count: int) -> Figures:
    """Many one-token requests, a bounded number at once."""

    async def go() -> float:
        limits = httpx.Limits(max_connections=STREAMS)
        async with httpx.AsyncClient(trust_env=False, base_url=stack.url, timeout=60, limits=limits) as client:
            body = chat_body("Hello", model=model, max_tokens=1)
            gate = asyncio.Semaphore(STREAMS)

            async def one() -> None:
                async with gate:
                    await stream_answer(client, body)

            await asyncio.gather(*(one() for _ in range(STREAMS)))
            started = time.perf_counter()
            await asyncio.gather(*(one() for _ in range(count)))
            return time.perf_counter() - started

    before = _cpu_s(stack)
    wall_s = asyncio.run(go())
    return _figures(stack, before, count, wall_s)


def measure_tokens(stack: Stack, model: str, tokens: int) -> Figures:
    """Long streams, as many as there are rows."""
    bodies = [chat_body(f"Stream {i}", model=model, max_tokens=tokens) for i in range(STREAMS)]
    before = _cpu_s(stack)
    done = asyncio.run(run_round(stack.url, bodies))
    return _figures(stack, before, sum(answer.tokens for answer in done.answers), done.wall_s)


def _figures(stack: Stack, before: Mapping[str, float], count: int, wall_s: float) -> Figures:
    after = _cpu_s(stack)
    return Figures(count / wall_s, {name: (after[name] - before[name]) / count * 1e6 for name in after})


def _cpu_s(stack: Stack) -> dict[str, float]:
    times = {name: psutil.Process(process.pid).cpu_times() for name, process in stack.processes.items()}
    times["client"] = psutil.Process().cpu_times()
    return {name: float(t.user + t.system) for name, t in times.items()}


def _profile(figures: Figures, unit: str) -> str:
    shares = sorted(figures.cpu_us.items(), key=lambda item: -item[1])
    return "    processor time: " + ", ".join(f"{name} {us:.0f} us" for name, us in shares) + f" per {unit}"


if __name__ == "__main__":
    main()
