"""Clients whose every token is known: streaming, whole, leaving early, offline, and a deliberate poison."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from benchmarks.mayhem.ledger import Ledger
from broker.client import Client
from broker.errors import BrokerError, RefusedError
from broker.wire import Failed, Finished
from mtplx_core.engine import Row
from mtplx_core.scripted import scripted_completion
from tests.support.scripted import SCRIPT, ask, hear
from workers.scripted_lane import NAME, encode_text

POISON = "poison!"
ANSWER_S = 120.0
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
            await asyncio.wait(self._tasks, timeout=ANSWER_S)

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
        elif draw < 0.99:
            await self._offline(text, length)
        else:
            await self._poison(text)

    def _pick(self) -> str:
        """A balancer that leaves alone who says that it is going down."""
        healthy = [name for name in self._town.urls if name not in self._town.broken]
        return self._random.choice(healthy or sorted(self._town.urls))

    async def _stream(self, text: str, length: int) -> None:
        api = self._pick()
        try:
            async with asyncio.timeout(ANSWER_S):
                seen, end = await self._read_stream(api, text, length)
        except TimeoutError:
            self._ledger.note("stream", "silent", text[:40])
        except httpx.TransportError as error:
            self._note_break("stream", api, error)
        else:
            self._judge("stream", api, Told(text, length, seen, end))

    async def _read_stream(self, api: str, text: str, length: int) -> tuple[str, str]:
        """The text seen, and `done`, `status ...`, or the error event."""
        parts: list[str] = []
        end = "nothing"
        async with _http(self._town.urls[api]) as http, _stream(http, text, length) as response:
            if response.status_code != 200:
                return "", await _refusal(response)
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    end = "done" if end == "length" else f"done after {end}"
                elif line.startswith("data: "):
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        return "".join(parts), f"error {chunk['error']}"
                    parts.append(chunk["choices"][0]["text"])
                    end = chunk["choices"][0]["finish_reason"] or end
        return "".join(parts), end

    async def _whole(self, text: str, length: int) -> None:
        api = self._pick()
        try:
            async with asyncio.timeout(ANSWER_S), _http(self._town.urls[api]) as http:
                response = await http.post("/v1/completions", json=_body(text, length, stream=False))
        except TimeoutError:
            self._ledger.note("whole", "silent", text[:40])
        except httpx.TransportError as error:
            self._note_break("whole", api, error)
        else:
            if response.status_code != 200:
                self._judge("whole", api, Told(text, length, "", await _refusal(response)))
            else:
                choice = response.json()["choices"][0]
                end = "done" if choice["finish_reason"] == "length" else str(choice["finish_reason"])
                self._judge("whole", api, Told(text, length, choice["text"], end))

    async def _leave(self, text: str, length: int, *, after: int) -> None:
        api, seen = self._pick(), ""
        try:
            async with (
                asyncio.timeout(ANSWER_S),
                _http(self._town.urls[api]) as http,
                _stream(http, text, length) as response,
            ):
                if response.status_code != 200:
                    return self._judge("leave", api, Told(text, length, "", await _refusal(response)))
                async for line in response.aiter_lines():
                    if after <= 0:
                        break
                    if line.startswith("data: {"):
                        chunk = json.loads(line.removeprefix("data: "))
                        seen += chunk["choices"][0]["text"] if "choices" in chunk else ""
                        after -= 1
        except TimeoutError:
            self._ledger.note("leave", "silent", text[:40])
        except httpx.TransportError as error:
            self._note_break("leave", api, error)
        else:
            is_right = expected(text, length).startswith(seen)
            self._ledger.note("leave", "left" if is_right else "wrong", seen[:80])

    async def _offline(self, text: str, length: int) -> None:
        wanted = ask(text, length, priority="offline")
        try:
            async with asyncio.timeout(ANSWER_S):
                handle = await self._client.submit(wanted.request, wanted.ticket)
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
                heard = await hear(await self._client.submit(wanted.request, wanted.ticket))
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
            self._ledger.note(kind, "finished" if told.seen == right else "wrong", f"{told.seen[:60]!r}")
        elif not right.startswith(told.seen):
            self._ledger.note(kind, "wrong", f"{told.end}: {told.seen[:60]!r}")
        elif told.end.startswith(("status 503", "status 429")):
            self._ledger.note(kind, "refused")
        elif api in self._town.broken and (told.end == "nothing" or "shutdown" in told.end or "listener" in told.end):
            self._ledger.note(kind, "cut")
        else:
            self._ledger.note(kind, "error", f"{api}: {told.end}")

    def _note_break(self, kind: str, api: str, error: httpx.TransportError) -> None:
        excused = api in self._town.broken
        self._ledger.note(kind, "cut" if excused else "error", f"{api}: {error!r}")


@dataclass(frozen=True, slots=True)
class Told:
    """What a client was told of its request."""

    text: str
    length: int
    seen: str
    end: str


def expected(text: str, length: int) -> str:
    """The completion a scripted lane gives."""
    tokens = scripted_completion(Row("row", encode_text(text), length), SCRIPT)
    return _decode(tokens)


def _decode(tokens: Sequence[int]) -> str:
    return "".join(_characters()[token] for token in tokens)


def _characters() -> dict[int, str]:
    if not _CHARACTERS:
        _CHARACTERS.update({encode_text(chr(code))[0]: chr(code) for code in range(0x20, 0x7F)})
    return _CHARACTERS


_CHARACTERS: dict[int, str] = {}


def _body(text: str, length: int, *, stream: bool) -> dict[str, object]:
    return {"model": NAME, "prompt": text, "max_tokens": length, "temperature": 0, "stream": stream}


def _stream(http: httpx.AsyncClient, text: str, length: int) -> contextlib.AbstractAsyncContextManager[httpx.Response]:
    return http.stream("POST", "/v1/completions", json=_body(text, length, stream=True))


async def _refusal(response: httpx.Response) -> str:
    return f"status {response.status_code} {(await response.aread())[:200]!r}"


def _http(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(ANSWER_S, connect=5))
