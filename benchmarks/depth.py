"""What a round of the former costs by the number of requests that wait, and what one of them takes of Redis' memory.

`python -m benchmarks.depth [--quick] [--json]`. A server of its own, requests accepted through pipelined scripts, and
one former driven round by round: an idle fleet's round (no free row), and one that forms a cohort.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import click
from redis.asyncio import Redis

from benchmarks.ratios import report
from broker import keys
from broker.connection.connect import connect
from broker.former.daemon import Former, FormerConfig
from broker.scripts import Bounds, Registration, Scripts, Submission, accept_call, source
from broker.wire import Lane, Request, Ticket, encode, new_id, pack_tokens, seed_of
from harness.stack import answers, redis_process, wait_until

DEPTHS = (1_000, 10_000, 100_000, 500_000)
QUICK_DEPTHS = (1_000, 10_000, 50_000)
AT_ONCE = 200
ROUNDS = 100
PROMPT_TOKENS = 50
MODEL = "depth-model@0123456789ab"
BOUNDS = Bounds(10_000_000, 10**12)


class Cost(NamedTuple):
    """One round, on average."""

    cpu_ms: float
    """Processor time of the former."""
    commands: float
    kbytes: float
    """Sent and received by Redis."""


@click.command()
@click.option("--quick", is_flag=True, help="Up to 50,000.")
@click.option("--json", "as_json", is_flag=True)
def main(*, quick: bool, as_json: bool) -> None:
    """Measure."""
    result = asyncio.run(measure(QUICK_DEPTHS if quick else DEPTHS))
    lines = [f"{name}: {figures}" for name, figures in result.items()]
    report(lines, result, as_json=as_json)


async def measure(depths: tuple[int, ...]) -> dict[str, Any]:
    """Figures by depth."""
    with tempfile.TemporaryDirectory() as folder:
        process, url = redis_process(Path(folder))
        client = connect(url)
        try:
            wait_until(lambda: answers(url), "redis answers")
            return await _measure(client, depths)
        finally:
            await client.aclose()
            process.kill()
            process.wait()


async def _measure(client: Redis, depths: tuple[int, ...]) -> dict[str, Any]:
    scripts = Scripts(client)
    await scripts.register(_worker("w1"))
    former = Former(FormerConfig("unused", lease_s=3600.0), commands=client, blocking=client)
    found: dict[str, Any] = {}
    waiting, before = 0, await _memory(client)
    for depth in depths:
        await _fill(client, depth - waiting)
        read_s = await _read_everything(former)
        memory = await _memory(client)
        idle = await _rounds(former, client)
        forming = await _rounds(former, client, frees_row=True)
        waiting = depth - ROUNDS
        found[f"{depth:,}"] = {
            "first_reading_cpu_s": round(read_s, 2),
            "idle_round": idle._asdict(),
            "forming_round": forming._asdict(),
            "bytes_per_request": round((memory - before) / depth),
        }
    return found


async def _rounds(former: Former, client: Redis, *, frees_row: bool = False) -> Cost:
    spent_s, commands, traffic = 0.0, 0, 0
    for _ in range(ROUNDS):
        if frees_row:
            await client.hset(keys.daemon("w1"), "free", 1)
        first = await _counters(client)
        started_s = time.process_time()
        sent = await former.form()
        spent_s += time.process_time() - started_s
        last = await _counters(client)
        assert sent == int(frees_row)
        commands += last[0] - first[0]
        traffic += last[1] - first[1]
    return Cost(round(1000 * spent_s / ROUNDS, 2), commands / ROUNDS, round(traffic / ROUNDS / 1000, 1))


async def _read_everything(former: Former) -> float:
    started_s = time.process_time()
    await former.form()
    while former.is_behind:
        await former.form()
    return time.process_time() - started_s


async def _fill(client: Redis, count: int) -> None:
    sha = await client.script_load(source("accept"))
    for start in range(0, count, AT_ONCE):
        pipe = client.pipeline(transaction=False)
        for _ in range(start, min(start + AT_ONCE, count)):
            script_keys, args = accept_call(_submission(), BOUNDS)
            pipe.evalsha(sha, len(script_keys), *script_keys, *args)
        await pipe.execute()


def _submission() -> Submission:
    request_id = new_id("chatcmpl")
    prompt = pack_tokens(range(PROMPT_TOKENS))
    request = Request(id=request_id, model=MODEL, profile="balanced", prompt=prompt, max_tokens=256)
    ticket = Ticket(request_id, MODEL, "balanced", PROMPT_TOKENS, 256, "offline", "a-key")
    return Submission(request, ticket, seed_of(request_id), keys.reply("api-0123456789abcdef01234567"))


def _worker(worker_id: str) -> Registration:
    lane = Lane(MODEL, "balanced", "scripted", "ar_batch", 8, 8192)
    return Registration(worker_id, {"kind": "worker", "lane": encode(lane), "accepting": 1}, free_rows=0)


async def _counters(client: Redis) -> tuple[int, int]:
    info: Any = await client.info("stats")
    return info["total_commands_processed"], info["total_net_input_bytes"] + info["total_net_output_bytes"]


async def _memory(client: Redis) -> int:
    info: Any = await client.info("memory")
    return int(info["used_memory"])


if __name__ == "__main__":
    main()
