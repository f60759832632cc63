"""An answer whose reader is slow, or leaves: every choice ends once, and nothing is taken for read. Engine: none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import cast

import pytest

from api.calls.stream import AHEAD, Answer, BackgroundTasks, CallFault, Choice
from api.text.detokenizer import TextStream
from broker.scripts import Accepted
from broker.wire import Cause, Event, Failed, Finished, Tokens, pack_tokens
from harness.wait import PATIENCE_S

STOP_TOKEN = 2
ENDS: dict[str, tuple[Event, str]] = {
    "finished": (Finished("r", "length", AHEAD), "length"),
    "interrupted": (Finished("r", "cancelled", AHEAD, cause="shutdown"), "failed"),
    "failed": (Failed("r", "engine", "the row went wrong"), "failed"),
    "stopped-here": (Tokens("r", AHEAD, pack_tokens([STOP_TOKEN])), "stop"),
}
"""Last events, and as what they are counted."""


class ToldHandle:
    """A request whose events a test wrote down."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.accepted = Accepted(1, True, "r")
        self.causes: list[Cause] = []
        self.told = 0
        self._events = events

    async def events(self) -> AsyncIterator[Event]:
        for event in self._events:
            self.told += 1
            yield event

    @property
    def left(self) -> int:
        """Events nobody has read."""
        return len(self._events) - self.told

    async def abandon(self, cause: Cause = "client") -> None:
        self.causes.append(cause)

    def leave(self) -> None: ...


class LetterText:
    """A letter for each token; the stop token ends the text without one."""

    is_matched_by_worker = False
    shown_tokens = 0
    end: int | None = None

    def feed(self, tokens: Sequence[int]) -> str:
        if STOP_TOKEN in tokens:
            self.end = 0
        return "".join("x" for token in tokens if token != STOP_TOKEN)

    def finish(self) -> str:
        return ""


class ListedMeter:
    def __init__(self) -> None:
        self.ends: list[str] = []

    def tokens(self, index: int, count: int) -> None: ...

    def ended(self, how: str) -> None:
        self.ends.append(how)


def told(end: Event, *, letters: int) -> ToldHandle:
    return ToldHandle([*(Tokens("r", place, pack_tokens([1])) for place in range(letters)), end])


def answer_of(handle: ToldHandle, meter: ListedMeter) -> Answer:
    return Answer([Choice(0, handle, cast("TextStream", LetterText()))], BackgroundTasks(), meter)


async def until_told(handle: ToldHandle, *, but: int = 0) -> None:
    """All events but so many have been read; the last of these waits where the queue is full."""
    async with asyncio.timeout(PATIENCE_S):
        while handle.left > but:
            await asyncio.sleep(0)


@pytest.mark.parametrize(("end", "how"), ENDS.values(), ids=ENDS)
async def test_request_that_ended_behind_a_slow_client_that_leaves_is_counted_once(end: Event, how: str) -> None:
    handle, meter = told(end, letters=AHEAD), ListedMeter()
    answer = answer_of(handle, meter)
    await until_told(handle)

    answer.release()
    await asyncio.sleep(0)

    assert meter.ends == [how]
    assert set(handle.causes) <= {"stop"}


async def test_request_whose_text_waits_for_a_slow_client_that_leaves_is_counted_once() -> None:
    handle, meter = told(ENDS["finished"][0], letters=AHEAD + 1), ListedMeter()
    answer = answer_of(handle, meter)
    await until_told(handle, but=1)

    answer.release()
    await asyncio.sleep(0)

    assert (meter.ends, handle.causes) == (["left"], ["client"])


@pytest.mark.parametrize(("end", "how"), ENDS.values(), ids=ENDS)
async def test_request_whose_end_was_taken_is_counted_once_and_by_its_end(end: Event, how: str) -> None:
    handle, meter = told(end, letters=3), ListedMeter()
    answer = answer_of(handle, meter)
    while not answer.is_over:
        await answer.next_items()

    answer.release()
    await asyncio.sleep(0)

    assert meter.ends == [how]
    assert set(handle.causes) <= {"stop"}


async def test_failure_behind_a_full_queue_is_still_to_come() -> None:
    handle = told(ENDS["failed"][0], letters=AHEAD)
    answer = answer_of(handle, ListedMeter())
    await until_told(handle)

    items = await answer.next_items()
    was_over = answer.is_over
    rest = await answer.next_items()

    assert (len(items), was_over) == (AHEAD, False)
    assert [type(item) for item in rest] == [CallFault]
    assert answer.is_over
