"""Clients whose every token is known: streaming, whole, leaving early, offline, and a deliberate poison."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx

from benchmarks.faults.ledger import Ledger
from broker.client.client import Client
from broker.errors import BrokerError, RefusedError
from broker.wire import Failed, Finished
from harness.announcements import Told, body_of, expected, listen, refusal
from harness.scripted import ask, hear

POISON = "poison!"
ANSWER_S = 90.0
RETENTION_S = 30
"""How long ended requests are kept: with more, what Redis holds would grow by rights over the whole run."""
"""How long a client waits for its whole answer before it calls the server silent."""
RETRY_S = 0.2


@dataclass(slots=True)
class Town:
    """Where clients go, and what they must know to judge what happens to them."""

    urls: Mapping[str, str]
    """API process by name to its address."""
    broken: set[str]
    """API processes that were killed, stopped or told to end just now."""
    in_hand: set[str] = field(default_factory=set)
    """Those of them that are being broken at this moment."""
    released_s: dict[str, float] = field(default_factory=dict)
    """When each was let alone again, on the monotonic clock."""


class Traffic:
    """Makes requests until it is told to stop, then waits for those under way."""

    def __init__(self, town: Town, ledger: Ledger, client: Client, *, seed: int) -> None:
        self._town = town
        self._ledger = ledger
        self._client = client
        self._random = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._count = 0
        self._stopping = asyncio.Event()

    async def run(self, *, at_once: int) -> None:
        gate = asyncio.Semaphore(at_once)
        while not self._stopping.is_set():
            await gate.acquire()
            task = asyncio.create_task(self._one())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: gate.release())
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        self._stopping.set()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=ANSWER_S + 5)
            for task in late:  # each has a limit of its own, and none should be here
                self._ledger.note("client", "silent", f"its own time limit did not end it: {task.get_stack(limit=3)}")
                task.cancel()

    async def _one(self) -> None:
        self._count += 1
        draw = self._random.random()
        length = self._random.choice((1, 5, 20, 60, 150))
        text = f"{self._count}: " + "z" * self._random.choice((3, 30, 300))
        if draw < 0.45:
            await self._stream(text, length)
        elif draw < 0.65:
            await self._whole(text, length)
        elif draw < 0.85:
            await self._leave(text, 400, after=self._random.choice((0, 1, 7)))
        elif draw < 0.995:
            await self._offline(text, length)
        else:
            await self._poison(text)

    def _pick(self) -> str:
        """A balancer that leaves alone who says that it is going down."""
        healthy = [name for name in self._town.urls if name not in self._town.broken]
        return self._random.choice(healthy or sorted(self._town.urls))

    async def _stream(self, text: str, length: int) -> None:
        api, told = self._pick(), Told(text, length)
        try:
            async with asyncio.timeout(ANSWER_S), _http(self._town.urls[api]) as http:
                await listen(http, told)
        except TimeoutError:
            self._ledger.note("stream", "silent", f"{api}: {told}")
        except httpx.TransportError as error:
            self._note_break("stream", api, error)
        else:
            self._judge("stream", api, told)

    async def _whole(self, text: str, length: int) -> None:
        api = self._pick()
        try:
            async with asyncio.timeout(ANSWER_S), _http(self._town.urls[api]) as http:
                response = await http.post("/v1/completions", json=body_of(text, length, stream=False))
        except TimeoutError:
            self._ledger.note("whole", "silent", f"{api}: {Told(text, length)}")
        except httpx.TransportError as error:
            self._note_break("whole", api, error)
        else:
            if response.status_code != 200:
                self._judge("whole", api, Told(text, length, end=await refusal(response)))
            else:
                choice = response.json()["choices"][0]
                end = "done" if choice["finish_reason"] == "length" else str(choice["finish_reason"])
                self._judge("whole", api, Told(text, length, seen=choice["text"], end=end))

    async def _leave(self, text: str, length: int, *, after: int) -> None:
        api, told = self._pick(), Told(text, length)
        try:
            async with (
                asyncio.timeout(ANSWER_S),
                _http(self._town.urls[api]) as http,
                http.stream("POST", "/v1/completions", json=body_of(text, length, stream=True)) as response,
            ):
                told.request_id = response.headers.get("x-request-id", "")
                if response.status_code != 200:
                    told.end = await refusal(response)
                    return self._judge("leave", api, told)
                async for line in response.aiter_lines():
                    if after <= 0:
                        break
                    if line.startswith("data: {"):
                        chunk = json.loads(line.removeprefix("data: "))
                        told.seen += chunk["choices"][0]["text"] if "choices" in chunk else ""
                        after -= 1
        except TimeoutError:
            self._ledger.note("leave", "silent", f"{api}: {told}")
        except httpx.TransportError as error:
            self._note_break("leave", api, error)
        else:
            is_right = expected(text, length).startswith(told.seen)
            self._ledger.note("leave", "left" if is_right else "wrong", str(told))

    async def _offline(self, text: str, length: int) -> None:
        wanted = ask(text, length, priority="offline")
        try:
            async with asyncio.timeout(ANSWER_S):
                handle = await self._client.submit(wanted.request, wanted.ticket, retain_ms=1000 * RETENTION_S)
                heard = await hear(handle)
        except (RefusedError, BrokerError) as error:
            self._ledger.note("offline", "refused", str(error))
        except (TimeoutError, AssertionError) as error:
            self._ledger.note("offline", "silent", repr(error))
        else:
            if heard.tokens == wanted.expected and isinstance(heard.end, Finished):
                self._ledger.note("offline", "finished")
            else:
                is_prefix = heard.tokens == wanted.expected[: len(heard.tokens)]
                self._ledger.note("offline", "error" if is_prefix else "wrong", str(heard.end))

    async def _poison(self, text: str) -> None:
        wanted = ask(f"{POISON} {text}", 20, priority="offline")
        try:
            async with asyncio.timeout(ANSWER_S):
                heard = await hear(
                    await self._client.submit(wanted.request, wanted.ticket, retain_ms=1000 * RETENTION_S)
                )
        except (RefusedError, BrokerError) as error:
            self._ledger.note("poison", "refused", str(error))
        except (TimeoutError, AssertionError) as error:
            self._ledger.note("poison", "silent", repr(error))
        else:
            is_dead = isinstance(heard.end, Failed) and heard.end.code == "crashed_workers"
            self._ledger.note("poison", "poisoned" if is_dead else "error", str(heard.end))

    def _judge(self, kind: str, api: str, told: Told) -> None:
        right = expected(told.text, told.length)
        if told.end == "done":
            self._ledger.note(kind, "finished" if told.seen == right else "wrong", f"{api}: {told}")
        elif not right.startswith(told.seen):
            self._ledger.note(kind, "wrong", f"{api}: {told}")
        elif told.end.startswith(("status 503", "status 429")):
            self._ledger.note(kind, "refused")
        elif api in self._town.broken and (told.end == "nothing" or "shutdown" in told.end or "listener" in told.end):
            self._ledger.note(kind, "cut")
        else:
            self._ledger.note(kind, "error", f"{api}: {told}")

    def _note_break(self, kind: str, api: str, error: httpx.TransportError) -> None:
        excused = api in self._town.broken
        self._ledger.note(kind, "cut" if excused else "error", f"{api}: {error!r}")


def _http(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(trust_env=False, verify=False, base_url=url, timeout=httpx.Timeout(ANSWER_S, connect=5))
