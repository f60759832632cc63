"""What crowds of clients do to the API: leavers, idle streams, bursts, and sixteen times as many clients as rows.

`python -m benchmarks.storm [--quick] [--json]`. Real processes on the scripted engine, so that only the system's own
costs show.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import click
import httpx
import psutil

from api.http.descriptors import allow_many_connections as raise_file_limit
from benchmarks.ratios import report
from harness.announcements import Told, body_of, listen
from harness.stack import Stack

SCRIPT = ("--engine", "scripted", "--script-step-s", "0.01", "--max-context-tokens", "8192")
EXACT = "b1-exact"


@click.command()
@click.option("--quick", is_flag=True, help="A quarter of the clients.")
@click.option("--json", "as_json", is_flag=True)
def main(*, quick: bool, as_json: bool) -> None:
    """Measure all four crowds."""
    share = 4 if quick else 1
    result = {
        "leavers": asyncio.run(measure_leavers(160 // share, 200 // share)),
        "idle": asyncio.run(measure_idle(1000 // share)),
        "burst": asyncio.run(measure_burst(2000 // share)),
        "overload": asyncio.run(measure_overload(128 // share)),
    }
    report([f"{crowd}: {figures}" for crowd, figures in result.items()], result, as_json=as_json)


async def measure_leavers(at_headers: int, at_first_chunk: int) -> dict[str, Any]:
    """Streams with long prompts that are cut after the headers, then others after their first token."""
    async with _stack(("--prefill-chunk-tokens", "512", "--script-prefill-token-s", "0.0001")) as stack:
        before_s = [await _first_token_s(stack) for _ in range(5)]
        started_s = time.monotonic()
        await asyncio.gather(*(_leave(stack, f"{i} " + "l" * 4000, after=0) for i in range(at_headers)))
        await asyncio.gather(*(_leave(stack, f"{i} s", after=1) for i in range(at_first_chunk)))
        left_s = time.monotonic()
        await _until_idle(stack)
        idle_s = time.monotonic()
        after_s = [await _first_token_s(stack) for _ in range(5)]
    return {
        "clients": at_headers + at_first_chunk,
        "storm_s": round(left_s - started_s, 2),
        "idle_after_s": round(idle_s - left_s, 2),
        "first_token_before_ms": _median_ms(before_s),
        "first_token_after_ms": _median_ms(after_s),
    }


async def measure_idle(streams: int) -> dict[str, Any]:
    """Streams that wait for rows while one other stream runs: what they cost it, and the API process."""
    async with _stack(("--script-step-s", "3600", "--stall-s", "7200")) as stack:
        stack.arguments["worker"] = (*SCRIPT, "--profile", EXACT)
        stack.start_one("worker-1")
        await asyncio.to_thread(_wait_for_workers, stack, 2)
        alone_s = await _gaps_s(stack)
        api = psutil.Process(stack.processes["api-0"].pid)
        rss_before = api.memory_info().rss
        async with httpx.AsyncClient(
            trust_env=False, verify=False, base_url=stack.url, timeout=None, limits=_limits()
        ) as http:
            idle = [asyncio.create_task(listen(http, Told(f"idle {i}", 100))) for i in range(streams)]
            await _until_queued(stack, streams)
            api.cpu_percent()
            beside_s = await _gaps_s(stack)
            cpu_percent = api.cpu_percent()
            rss_after = api.memory_info().rss
            for task in idle:
                task.cancel()
            await asyncio.gather(*idle, return_exceptions=True)
    return {
        "streams": streams,
        "gap_alone_ms": _spread_ms(alone_s),
        "gap_beside_idle_ms": _spread_ms(beside_s),
        "api_cpu_percent": round(cpu_percent, 1),
        "api_kb_per_stream": round((rss_after - rss_before) / streams / 1024, 1),
    }


async def measure_burst(streams: int) -> dict[str, Any]:
    """Streams that all begin at once: how they end, what they take of the API process, and how fast it is meanwhile."""
    raise_file_limit()
    async with _stack(("--decode-batch-max", "64")) as stack:
        api = psutil.Process(stack.processes["api-0"].pid)
        rss_before, most_rss, most_files = api.memory_info().rss, 0, 0
        headers_s: list[float] = []
        ends: Counter[str] = Counter()
        started_s = time.monotonic()
        async with httpx.AsyncClient(verify=False, base_url=stack.url, timeout=600, limits=_limits()) as http:
            crowd = asyncio.gather(*(_burst_stream(http, f"burst {i}", ends, headers_s) for i in range(streams)))
            while not crowd.done():
                await asyncio.wait([crowd], timeout=0.5)
                most_rss = max(most_rss, api.memory_info().rss)
                most_files = max(most_files, api.num_fds())
            await crowd
    return {
        "streams": streams,
        "ends": dict(ends),
        "all_done_s": round(time.monotonic() - started_s, 2),
        "headers_ms": _spread_ms(headers_s),
        "api_kb_per_stream": round((most_rss - rss_before) / streams / 1024, 1),
        "api_files": most_files,
    }


async def _burst_stream(http: httpx.AsyncClient, text: str, ends: Counter[str], headers_s: list[float]) -> None:
    asked_s, seen = time.monotonic(), ""
    try:
        async with http.stream("POST", "/v1/completions", json=body_of(text, 8, stream=True)) as response:
            headers_s.append(time.monotonic() - asked_s)
            async for line in response.aiter_lines():
                seen = line or seen
            ends["done" if seen == "data: [DONE]" else f"status {response.status_code}: {seen[:60]}"] += 1
    except httpx.TransportError as error:
        ends[type(error).__name__] += 1


async def measure_overload(clients: int) -> dict[str, Any]:
    """Clients on eight rows and a queue that does not hold them all; each comes back when it is told to."""
    stack_bound = max(clients * 3 // 4, 9)
    async with _stack((), api=("--queue-requests-max", str(stack_bound), "--registry-age-s", "0.2")) as stack:
        refusals: Counter[int] = Counter()
        pages_s: list[float] = []
        started_s = time.monotonic()
        answers = asyncio.gather(*(_insist(stack, f"client {i}", refusals) for i in range(clients)))
        async with httpx.AsyncClient(trust_env=False, verify=False, base_url=stack.url, timeout=30) as http:
            while not answers.done():
                for path in ("/health", "/metrics", "/v1/models"):
                    asked_s = time.monotonic()
                    await http.get(path)
                    pages_s.append(time.monotonic() - asked_s)
        took_s = await answers
    return {
        "clients": clients,
        "queue_bound": stack_bound,
        "all_done_s": round(time.monotonic() - started_s, 2),
        "answer_s": [round(each, 2) for each in (min(took_s), sorted(took_s)[len(took_s) // 2], max(took_s))],
        "refusals": {str(status): count for status, count in refusals.items()},
        "state_page_ms": _spread_ms(pages_s),
    }


@contextlib.asynccontextmanager
async def _stack(worker: Sequence[str], *, api: Sequence[str] = ()) -> Any:
    stack = Stack()
    stack.arguments["worker"] = (*SCRIPT, *worker)
    stack.arguments["api"] = api
    await asyncio.to_thread(stack.start)
    try:
        yield stack
    finally:
        await asyncio.to_thread(stack.stop)


async def _leave(stack: Stack, text: str, *, after: int) -> None:
    """Open a stream and reset it after so many chunks."""
    async with (
        httpx.AsyncClient(trust_env=False, verify=False, base_url=stack.url, timeout=120) as http,
        http.stream("POST", "/v1/completions", json=body_of(text, 4096, stream=True)) as response,
    ):
        if not after:
            return
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                return


async def _insist(stack: Stack, text: str, refusals: Counter[int]) -> float:
    started_s = time.monotonic()
    async with httpx.AsyncClient(trust_env=False, verify=False, base_url=stack.url, timeout=120) as http:
        while True:
            answer = await http.post("/v1/completions", json=body_of(text, 60, stream=False))
            if answer.status_code == 200:
                return time.monotonic() - started_s
            refusals[answer.status_code] += 1
            await asyncio.sleep(float(answer.headers["retry-after"]))


async def _first_token_s(stack: Stack) -> float:
    started_s = time.monotonic()
    async with httpx.AsyncClient(trust_env=False, verify=False, base_url=stack.url, timeout=120) as http:
        await http.post("/v1/completions", json=body_of("first token", 1, stream=False))
    return time.monotonic() - started_s


async def _gaps_s(stack: Stack) -> list[float]:
    """Seconds between the tokens of one stream on the lane that is not stuck."""
    at_s: list[float] = []
    body = {**body_of("active", 300, stream=True), "numerics_profile": EXACT}
    async with httpx.AsyncClient(trust_env=False, verify=False, base_url=stack.url, timeout=120) as http:
        while not at_s:  # the API hears of a new lane a little later
            async with http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code >= 500:
                    raise RuntimeError((await response.aread()).decode())
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        at_s.append(time.monotonic())
    return [later - sooner for sooner, later in zip(at_s, at_s[1:], strict=False)]


async def _until_idle(stack: Stack) -> None:
    """Until nothing is queued and no row is active, as `/health` says."""
    async with httpx.AsyncClient(trust_env=False, verify=False, base_url=stack.url, timeout=30) as http:
        while True:
            health = (await http.get("/health")).json()
            rows = [worker["rows_free"] - worker["rows"] for lane in health["lanes"] for worker in lane["workers"]]
            if not any(health["queue"].values()) and not any(rows):
                return
            await asyncio.sleep(0.02)


async def _until_queued(stack: Stack, count: int) -> None:
    async with httpx.AsyncClient(trust_env=False, verify=False, base_url=stack.url, timeout=30) as http:
        while (await http.get("/health")).json()["queue"].get("interactive", 0) < count:
            await asyncio.sleep(0.1)


def _wait_for_workers(stack: Stack, count: int) -> None:
    while stack.accepting_workers() < count:
        time.sleep(0.05)


def _limits() -> httpx.Limits:
    return httpx.Limits(max_connections=None)


def _median_ms(seconds: Sequence[float]) -> float:
    return round(1000 * sorted(seconds)[len(seconds) // 2], 1)


def _spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50": round(1000 * ordered[len(ordered) // 2], 1),
        "p99": round(1000 * ordered[int(len(ordered) * 0.99)], 1),
        "max": round(1000 * ordered[-1], 1),
    }


if __name__ == "__main__":
    main()
