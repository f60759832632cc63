"""A client of a scripted lane over HTTP, and what it was told: every character of the answer is known beforehand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

import httpx

from harness.scripted import SCRIPT
from mtplx_core.engine import Row
from mtplx_core.engines.scripted import scripted_completion
from workers.scripted_lane import NAME, encode_text

NOTHING, DONE = "nothing", "done"


@dataclass(slots=True)
class Told:
    """What a client asked for and what it was told so far."""

    text: str
    length: int
    request_id: str = ""
    seen: str = ""
    end: str = NOTHING
    """`done`, `status ...`, `error ...`, or `nothing` as long as there is none."""

    @property
    def is_right(self) -> bool:
        """One proper end, and every token right."""
        return self.end == DONE and self.seen == expected(self.text, self.length)

    @property
    def is_right_so_far(self) -> bool:
        return expected(self.text, self.length).startswith(self.seen)

    @property
    def is_broken_off(self) -> bool:
        """Ended by an error event, and nothing wrong before it."""
        return self.end.startswith("error") and self.is_right_so_far

    def __str__(self) -> str:
        return f"{self.request_id} {self.text[:12]!r} got {len(self.seen)} of {self.length}, then {self.end}"


def expected(text: str, length: int) -> str:
    """The completion a scripted lane gives."""
    tokens = scripted_completion(Row("row", encode_text(text), length), SCRIPT)
    return "".join(_characters()[token] for token in tokens)


def body_of(text: str, length: int, *, stream: bool) -> dict[str, object]:
    return {"model": NAME, "prompt": text, "max_tokens": length, "temperature": 0, "stream": stream}


async def listen(http: httpx.AsyncClient, told: Told) -> Told:
    """Ask for a stream and read it to its end; `told` grows meanwhile."""
    async with http.stream("POST", "/v1/completions", json=body_of(told.text, told.length, stream=True)) as response:
        told.request_id = response.headers.get("x-request-id", "")
        if response.status_code != 200:
            told.end = await refusal(response)
            return told
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                _take(told, line.removeprefix("data: "))
    return told


async def refusal(response: httpx.Response) -> str:
    return f"status {response.status_code} {(await response.aread())[:200]!r}"


def _take(told: Told, data: str) -> None:
    if data == "[DONE]":
        told.end = DONE if told.end == "length" else f"done after {told.end}"
        return
    chunk = json.loads(data)
    if "error" in chunk:
        told.end = f"error {chunk['error']}"
        return
    told.seen += chunk["choices"][0]["text"]
    told.end = chunk["choices"][0]["finish_reason"] or told.end


@cache
def _characters() -> dict[int, str]:
    return {encode_text(chr(code))[0]: chr(code) for code in range(0x20, 0x7F)}
