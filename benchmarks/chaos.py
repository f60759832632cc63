"""Everything breaks, nothing is lost: real processes, mixed traffic, and something killed every few seconds.

`python -m benchmarks.chaos [--minutes M] [--seed S] [--quick] [--json]`. Two API processes, two formers, three workers
on the scripted engine and a durable Redis, so that every token is known.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import click
import psutil

from benchmarks.faults.injector import LEASE_S, Killer
from benchmarks.faults.ledger import Ledger
from benchmarks.faults.proxy import Proxy
from benchmarks.faults.traffic import ANSWER_S, POISON, RETENTION_S, Town, Traffic
from benchmarks.ratios import report
from broker import keys
from broker.client.client import Client
from broker.wire import TERMINAL
from harness.stack import Stack, answers, connection

SETTLE_S = 60.0
MARGIN_S = 120.0
"""How much longer than its parts together a run may take before it is ended with a word about what it waited for."""


@dataclass(slots=True)
class Findings:
    """What a run is judged by."""

    ledger: Ledger
    lost: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    """What daemons logged as errors, where anything needs an explanation."""
    memory_growth: Mapping[str, float] = field(default_factory=dict)
    """Resident memory in the last third over the second third, by kind of daemon."""

    @property
    def result(self) -> dict[str, Any]:
        ledger = self.ledger
        return {
            "kills": dict(ledger.kills),
            "requests": ledger.requests,
            "finished": ledger.count("finished"),
            "finished_share": round(ledger.finished_share, 4),
            "lost": len(self.lost) + ledger.count("silent"),
            "doubled": ledger.count("wrong"),
            "unexplained_errors": ledger.count("error"),
            "leftovers": self.leftovers,
            "memory_growth": {kind: round(growth, 3) for kind, growth in self.memory_growth.items()},
        }


@click.command()
@click.option("--minutes", type=float, default=5.0, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--quick", is_flag=True, help="One minute.")
@click.option("--json", "as_json", is_flag=True)
def main(*, minutes: float, seed: int, quick: bool, as_json: bool) -> None:
    """Break things."""
    findings = asyncio.run(run_chaos(seconds=60 * (1 if quick else minutes), seed=seed))
    ledger = findings.ledger
    lines = [f"{kind:8} {outcome:9} {count}" for (kind, outcome), count in sorted(ledger.outcomes.items())]
    lines += [f"broken: {what} {count}" for what, count in sorted(ledger.kills.items())]
    lines += [*(ledger.story if ledger.notes else []), *findings.lost[:20], *findings.leftovers[:20]]
    lines += findings.complaints[-200:]
    report(lines, findings.result, as_json=as_json)


async def run_chaos(
    *, seconds: float, seed: int, pause_s: float = 2.0, at_once: int = 24, step_s: float = 0.01
) -> Findings:
    """One run, judged.

    Args:
        step_s: what a decoding step takes; longer ones keep requests as long under way with fewer messages.

    Raises:
        TimeoutError: the run itself hangs; says in which phase.
    """
    stack = Stack(formers=2, workers=3, apis=2)
    proxy = Proxy(stack.socket)
    await proxy.start()
    through_proxy = ("--redis", f"redis://127.0.0.1:{proxy.port}/0")
    lease = ("--lease-s", str(LEASE_S))
    script = ("--engine", "scripted", "--script-step-s", str(step_s), "--script-crash-text", POISON)
    stack.arguments = {"redis": (), "former": (*through_proxy, *lease)}
    stack.arguments["api"] = (*through_proxy, "--retention-s", str(RETENTION_S), "--redis-connections", "3")
    stack.arguments["worker"] = (*through_proxy, *lease, *script, "--grace-s", "3")
    phase = Phase()
    try:
        await asyncio.to_thread(stack.start)
        async with asyncio.timeout(seconds + ANSWER_S + SETTLE_S + MARGIN_S):
            with stack.supervised():
                return await _break_and_judge(stack, proxy, Run(seconds, seed, pause_s, at_once, phase))
    except TimeoutError as error:
        raise TimeoutError(f"the run hung while it should {phase.name}\n{stack.logs()}") from error
    finally:
        await asyncio.to_thread(stack.stop)
        await proxy.stop()


@dataclass(slots=True)
class Phase:
    """What a run is at, for whoever finds that it hangs."""

    name: str = "start"


@dataclass(frozen=True, slots=True)
class Run:
    seconds: float
    seed: int
    pause_s: float
    at_once: int
    phase: Phase


async def _break_and_judge(stack: Stack, proxy: Proxy, run: Run) -> Findings:
    ledger = Ledger()
    town = Town({name: stack.url_of(name) for name in stack.ports}, set())
    client = await Client.open(f"redis://127.0.0.1:{proxy.port}/0")
    traffic = Traffic(town, ledger, client, seed=run.seed)
    killer = Killer(stack, proxy, town, ledger, seed=run.seed)
    memory = Memory(stack, run.seconds)
    watch = asyncio.create_task(memory.watch())
    flow = asyncio.create_task(traffic.run(at_once=run.at_once))
    run.phase.name = "break things"
    await killer.run(seconds=run.seconds, pause_s=run.pause_s)
    run.phase.name = "let clients end"
    await traffic.stop()
    run.phase.name = "end its own tasks"
    watch.cancel()
    flow.cancel()
    await asyncio.gather(watch, flow, return_exceptions=True)
    await client.close()
    findings = Findings(ledger, memory_growth=memory.growth())
    run.phase.name = "settle"
    await asyncio.to_thread(_settle, stack)
    findings.lost, findings.leftovers = unended(stack), leftovers(stack)
    if ledger.notes or findings.lost or findings.leftovers:
        findings.complaints = complaints(stack)
    return findings


def _settle(stack: Stack) -> None:
    """Wait until nothing is in flight any more, as far as it will ever be."""
    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end:
        if answers(stack.redis_url) and not unended(stack) and not leftovers(stack):
            return
        time.sleep(0.5)


def unended(stack: Stack) -> list[str]:
    """Accepted requests without an end."""
    found = []
    with connection(stack.redis_url) as redis:
        for key in redis.scan_iter(keys.state("*"), count=1000):
            status = redis.hget(key, "status")
            if status is not None and status.decode() not in TERMINAL:  # None: it has expired meanwhile
                found.append(f"{key.decode()} is {status.decode()}")
    return found


def leftovers(stack: Stack) -> list[str]:
    """What an idle system must not hold."""
    with connection(stack.redis_url) as redis:
        found = [
            f"{redis.xlen(stream)} entries in {stream}"
            for stream in (keys.WAIT_INTERACTIVE, keys.WAIT_OFFLINE, keys.WAIT_RETURNED)
            if redis.xlen(stream)
        ]
        found += [f"{name.decode()} = {n.decode()}" for name, n in redis.hgetall(keys.LOAD).items() if int(n)]
        found += [f"rows of key {name!r}: {n!r}" for name, n in redis.hgetall(keys.KEY_ROWS).items()]
        apis = len(stack.ports)
        channels = [name for name in redis.pubsub_channels() if name.startswith(keys.reply("").encode())]
        found += [f"{len(channels)} reply channels for {apis} API processes"] if len(channels) > apis else []
        found += [f"{key} never expires" for key in stack.leaks()]
        every = [key.decode() for key in redis.scan_iter(count=1000)]
        found += [f"{key} is left" for key in every if key.startswith((keys.rows(""), keys.listening("")))]
    return found


def complaints(stack: Stack) -> list[str]:
    """Every line logged as an error, with the traceback that follows it."""
    found = []
    for path in sorted(stack.folder.glob("*.log")):
        is_wanted = False
        for line in path.read_text(errors="replace").splitlines():
            if line[:4].isdigit():
                is_wanted = " ERROR " in line
            if is_wanted:
                found.append(f"{path.stem}: {line}")
    return found


class Memory:
    """Resident memory by kind of daemon, sampled every second."""

    def __init__(self, stack: Stack, seconds: float) -> None:
        self._stack = stack
        self._seconds = seconds
        self._samples: list[tuple[float, str, int]] = []

    async def watch(self) -> None:
        started = time.monotonic()
        while True:
            for name, process in list(self._stack.processes.items()):
                try:
                    size = psutil.Process(process.pid).memory_info().rss
                except psutil.Error:
                    continue
                self._samples.append((time.monotonic() - started, name.partition("-")[0], size))
            await asyncio.sleep(1)

    def growth(self) -> dict[str, float]:
        """Largest in the last third over largest in the second."""
        thirds: dict[tuple[str, int], int] = defaultdict(int)
        for at, kind, size in self._samples:
            third = min(int(3 * at / self._seconds), 2)
            thirds[kind, third] = max(thirds[kind, third], size)
        kinds = {kind for kind, third in thirds if third == 1}
        return {kind: thirds[kind, 2] / thirds[kind, 1] for kind in sorted(kinds) if thirds[kind, 2]}


if __name__ == "__main__":
    main()
