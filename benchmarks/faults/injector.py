"""Breaks one thing every few seconds, by a seed, and mends it again."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable

import httpx

from benchmarks.faults.ledger import Ledger
from benchmarks.faults.proxy import Proxy
from benchmarks.faults.traffic import Town
from broker import tasks
from harness.stack import Stack, answers, connection, wait_until

LEASE_S = 2.0
PAUSE_MAX_MS = 400
"""Shorter than a Redis is silent before it is taken for away."""
FORGIVE_S = 2.0
"""How long after a broken process answers again its clients' broken connections are excused."""


class Killer:
    """Owns what is broken on purpose."""

    def __init__(self, stack: Stack, proxy: Proxy, town: Town, ledger: Ledger, *, seed: int) -> None:
        self._stack = stack
        self._proxy = proxy
        self._town = town
        self._ledger = ledger
        self._random = random.Random(seed)
        self._deck: list[Callable[[], Awaitable[None]]] = []

    async def run(self, *, seconds: float, pause_s: float) -> None:
        """Break things until the time is over; what was broken last is mended."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        forgiving = asyncio.create_task(self.forgive())
        while loop.time() < end:
            await self._draw()()
            await asyncio.sleep(self._random.uniform(0.5, 1.5) * pause_s)
        await tasks.end(forgiving)

    def _draw(self) -> Callable[[], Awaitable[None]]:
        """Every kind of trouble comes once before any comes again."""
        if not self._deck:
            kinds = ("worker", "former", "api")
            self._deck = [
                *(lambda kind=kind: self._kill(kind) for kind in kinds),
                *(lambda kind=kind: self._terminate(kind) for kind in kinds),
                *(lambda kind=kind: self._freeze(kind) for kind in kinds),
                self._kill_redis,
                self._cut,
                self._lose_messages,
                lambda: self._kill_clients("normal"),
                lambda: self._kill_clients("pubsub"),
                self._flush_scripts,
                self._exhaust_pools,
                self._deny,
                lambda: self._kill("worker"),
            ]
            self._random.shuffle(self._deck)
        return self._deck.pop()

    def _pick(self, kind: str) -> str:
        return self._random.choice([name for name in self._stack.processes if name.startswith(kind)])

    async def _kill(self, kind: str) -> None:
        name = self._pick(kind)
        self._ledger.tell(f"kill {name}")
        with self._excused(name):
            self._stack.kill(name)
            self._ledger.kills[kind] += 1
            await asyncio.sleep(self._random.uniform(0, 0.5))

    async def _terminate(self, kind: str) -> None:
        name = self._pick(kind)
        self._ledger.tell(f"terminate {name}")
        with self._excused(name):
            self._stack.signal(name, signal.SIGTERM)
            self._ledger.kills[f"term {kind}"] += 1
            await self._wait_for_end(name)

    async def _freeze(self, kind: str) -> None:
        name, seconds = self._pick(kind), LEASE_S * self._random.uniform(0.5, 3)
        self._ledger.tell(f"freeze {name} for {seconds:.1f} s")
        with self._excused(name):
            self._stack.signal(name, signal.SIGSTOP)
            self._ledger.kills[f"freeze {kind}"] += 1
            await asyncio.sleep(seconds)
            self._stack.signal(name, signal.SIGCONT)

    async def _kill_redis(self) -> None:
        self._ledger.tell("kill redis")
        self._stack.held.add("redis")
        self._stack.kill("redis")
        self._ledger.kills["redis"] += 1
        await asyncio.sleep(self._random.uniform(0.2, 3))
        self._stack.start_one("redis")
        self._stack.held.discard("redis")

    async def _cut(self) -> None:
        self._ledger.tell("cut every connection")
        self._ledger.kills["cut connections"] += self._proxy.cut()

    async def _lose_messages(self) -> None:
        self._ledger.tell("lose messages")
        self._ledger.kills["lost messages"] += 1
        self._proxy.lose_last_messages(2)

    async def _kill_clients(self, kind: str) -> None:
        self._ledger.tell(f"CLIENT KILL TYPE {kind}")
        self._ledger.kills[f"{kind} clients"] += 1
        await asyncio.to_thread(self._command, "CLIENT", "KILL", "TYPE", kind)

    async def _flush_scripts(self) -> None:
        self._ledger.tell("SCRIPT FLUSH")
        self._ledger.kills["flushed scripts"] += 1
        await asyncio.to_thread(self._command, "SCRIPT", "FLUSH")

    async def _exhaust_pools(self) -> None:
        """Every connection has a command under way that is not answered, and callers queue behind them."""
        for_ms = self._random.randint(100, PAUSE_MAX_MS)
        self._ledger.tell(f"CLIENT PAUSE for {for_ms} ms")
        self._ledger.kills["exhausted pools"] += 1
        await asyncio.to_thread(self._command, "CLIENT", "PAUSE", str(for_ms), "ALL")
        await asyncio.sleep(for_ms / 1000)

    async def _deny(self) -> None:
        """Take the right to run scripts away for a moment that is shorter than a lease."""
        self._ledger.tell("take rights away")
        self._ledger.kills["denied rights"] += 1
        try:
            await asyncio.to_thread(self._command, "ACL", "SETUSER", "default", "-evalsha", "-eval")
            await asyncio.sleep(self._random.uniform(0.2, 0.5) * LEASE_S)
        finally:
            await asyncio.to_thread(self._command, "ACL", "SETUSER", "default", "+@all")
            self._ledger.tell("give rights back")

    def _command(self, *words: str) -> None:
        wait_until(lambda: answers(self._stack.redis_url), "redis answers", timeout_s=30)
        with connection(self._stack.redis_url) as redis:
            redis.execute_command(*words)

    async def _wait_for_end(self, name: str) -> None:
        for _ in range(200):
            if self._stack.processes[name].poll() is not None:
                return
            await asyncio.sleep(0.1)
        self._stack.kill(name)

    def _excused(self, name: str) -> Excuse:
        return Excuse(self._stack, self._town, name)

    async def forgive(self) -> None:
        """Take excuses away from those that answer again, over and over."""
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=1) as http:
            while True:
                await asyncio.sleep(FORGIVE_S / 4)
                for name in [name for name in self._town.broken if self._is_over(name)]:
                    if await self._answers(http, name):
                        self._town.broken.discard(name)
                        self._ledger.tell(f"{name} answers again")

    def _is_over(self, name: str) -> bool:
        """Whether its clients have had the time to notice."""
        is_in_hand = name in self._town.in_hand
        return not is_in_hand and time.monotonic() - self._town.released_s.get(name, 0.0) >= FORGIVE_S

    async def _answers(self, http: httpx.AsyncClient, name: str) -> bool:
        if name not in self._town.urls:
            return True
        try:
            return (await http.get(f"{self._town.urls[name]}/v1/models")).status_code == 200
        except httpx.TransportError:
            return False


class Excuse:
    """While a process is broken it is not started again, and clients of it have an excuse until it answers again."""

    def __init__(self, stack: Stack, town: Town, name: str) -> None:
        self._stack = stack
        self._town = town
        self._name = name

    def __enter__(self) -> None:
        self._stack.held.add(self._name)
        self._town.broken.add(self._name)
        self._town.in_hand.add(self._name)

    def __exit__(self, *error: object) -> None:
        self._town.in_hand.discard(self._name)
        self._town.released_s[self._name] = time.monotonic()
        self._stack.held.discard(self._name)
