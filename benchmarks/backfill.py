"""Offline work on the rows that interactive clients leave: what it costs them, and what it keeps.

`python -m benchmarks.backfill [--quick] [--json] [--head FOLDER]`. One worker of 8 rows; in turn: one interactive
client alone, offline work alone, and both together. All figures are of one run.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import click
import httpx

from api.calls.client import TextClient
from benchmarks.clients import PROMPTS, Answer, chat_body, stream_answer
from benchmarks.ratios import median, report

ROWS = 8
OFFLINE_TOKENS = 256
SETTLE_S = 3.0
"""Rows are full and the depth has settled after so long."""


class Plan(NamedTuple):
    """How much is done."""

    calls: int
    """Interactive calls, one after the other."""
    max_tokens: int
    alone_s: float
    """How long offline work is measured alone."""


class Interactive(NamedTuple):
    """What the interactive client saw."""

    first_token_s: float
    tokens_per_s: float


class Flow(NamedTuple):
    """Tokens decoded in some seconds, and cycles."""

    tokens: float
    cycles: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@click.command()
@click.option("--quick", is_flag=True, help="Fewer and shorter calls.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--mode", default="mtp_batch", type=click.Choice(["ar_batch", "mtp_batch"]))
@click.option("--head", type=click.Path(path_type=Path, exists=True), help="Else the shipped one.")
def main(*, quick: bool, as_json: bool, mode: str, head: Path | None) -> None:
    """Measure."""
    from harness.stack import Stack

    plan = Plan(4, 24, 10.0) if quick else Plan(12, 48, 40.0)
    stack = Stack()
    drafting = ("--head", str(head.resolve())) if head is not None else ()
    stack.arguments["worker"] = ("--scheduler-mode", mode, "--decode-batch-max", str(ROWS), *drafting)
    with stack:
        asyncio.run(measure(stack.redis_url, stack.url, plan, as_json=as_json))


async def measure(redis_url: str, url: str, plan: Plan, *, as_json: bool) -> None:
    """Alone, alone, together; then what that says."""
    async with (
        await TextClient.open(redis_url) as text,
        httpx.AsyncClient(trust_env=False, base_url=url, timeout=600) as http,
    ):
        [model] = [model.id for model in await text.catalog.models()]
        await call(http, model, plan, count=1)  # warms up
        idle, _ = await call(http, model, plan, count=plan.calls)
        async with flood(text, model):
            alone = await flow(text, plan.alone_s)
            before, began_s = await counters(text), time.perf_counter()
            busy, answers = await call(http, model, plan, count=plan.calls)
            after, seconds = await counters(text), time.perf_counter() - began_s
    taken = sum(answer.tokens for answer in answers)
    kept = Flow(after[0] - before[0] - taken, after[1] - before[1], seconds)
    held_s = sum(answer.total_s for answer in answers)
    left = 1 - held_s / seconds / ROWS  # part of all rows' time that the interactive client did not hold
    result = {
        "interactive_ttft_ratio": busy.first_token_s / idle.first_token_s,
        "interactive_tokens_ratio": busy.tokens_per_s / idle.tokens_per_s,
        "offline_kept": kept.tokens_per_s / (alone.tokens_per_s * left),
    }
    cycle_s = kept.seconds / kept.cycles if kept.cycles else float("nan")
    lines = [
        f"{ROWS} rows, {plan.calls} interactive calls of {plan.max_tokens} tokens one after the other",
        f"interactive alone:      first token {idle.first_token_s:.3f} s, {idle.tokens_per_s:.1f} tokens/s",
        f"interactive beside it:  first token {busy.first_token_s:.3f} s, {busy.tokens_per_s:.1f} tokens/s",
        f"first token later by {busy.first_token_s - idle.first_token_s:.3f} s; a cycle takes {cycle_s:.3f} s",
        f"offline alone {alone.tokens_per_s:.1f} tokens/s, beside it {kept.tokens_per_s:.1f} on {left:.1%} of the time",
    ]
    report(lines, result, as_json=as_json)


async def call(http: httpx.AsyncClient, model: str, plan: Plan, *, count: int) -> tuple[Interactive, list[Answer]]:
    """Calls one after the other, as one client makes them; medians."""
    answers = []
    for index in range(count):
        prompt = PROMPTS[index % len(PROMPTS)]
        body = chat_body(prompt, model=model, max_tokens=plan.max_tokens, ignore_eos=True)
        answers.append(await stream_answer(http, body))
        click.echo(f"first token {answers[-1].first_token_s:.3f} s, all {answers[-1].total_s:.3f} s", err=True)
    rates = [(answer.tokens - 1) / (answer.total_s - answer.first_token_s) for answer in answers]
    return Interactive(median([answer.first_token_s for answer in answers]), median(rates)), answers


@asynccontextmanager
async def flood(text: TextClient, model: str) -> AsyncIterator[None]:
    """More offline work than there are rows, for as long as the block lasts."""

    async def one(number: int) -> None:
        while True:
            prompt = f"{PROMPTS[number % len(PROMPTS)]} Variant {number}."
            messages = [{"role": "user", "content": prompt}]
            work = await text.chat(messages, model=model, max_tokens=OFFLINE_TOKENS, temperature=0, ignore_eos=True)
            await work.whole()

    tasks = [asyncio.create_task(one(number)) for number in range(3 * ROWS)]
    try:
        await asyncio.sleep(SETTLE_S)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def flow(text: TextClient, seconds: float) -> Flow:
    """What the worker decodes in some time."""
    before, began_s = await counters(text), time.perf_counter()
    await asyncio.sleep(seconds)
    after = await counters(text)
    return Flow(after[0] - before[0], after[1] - before[1], time.perf_counter() - began_s)


async def counters(text: TextClient) -> tuple[float, float]:
    """Tokens committed and cycles, as the worker's next heartbeat says; one comes every second."""
    [worker] = await text.client.registry.workers()
    while True:
        [now] = await text.client.registry.workers()
        if now.beat != worker.beat:
            break
        await asyncio.sleep(0.01)
    snapshot = json.loads(now.fields.get("snapshot", "{}"))
    return float(snapshot.get("tokens_committed", 0)), float(snapshot.get("cycles", snapshot.get("steps", 0)))


if __name__ == "__main__":
    main()
