"""An accepted call as it is answered: the events of its requests, turned into text, logprobs and one end each.

Both endpoints, streamed or whole, read an `Answer`; how it looks on the wire is `api.openai.formats`'.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from api.errors import ApiError, from_failed, interrupted
from api.fleet.backend import RequestHandle
from api.text.detokenizer import TextStream
from broker.wire import Cause, Failed, Finished, Progress, Stats, Tokens, unpack_tokens

logger = logging.getLogger(__name__)

AHEAD = 64
"""Items read ahead of a slow client; behind them the events wait in the broker's bounded inbox."""


class ShownToken(NamedTuple):
    """A token of the text with its logprobs."""

    token: int
    logprob: float
    top: Sequence[tuple[int, float]]
    piece: bytes = b""
    """What it adds to the text."""


class Delta(NamedTuple):
    choice: int
    text: str
    logprobs: Sequence[ShownToken] = ()


class PrefillUpdate(NamedTuple):
    choice: int
    done: int
    total: int


class End(NamedTuple):
    """The end of one choice; nothing follows for it."""

    choice: int
    reason: str
    completion_tokens: int
    stats: Stats


class CallFault(NamedTuple):
    """The call has failed; nothing follows."""

    error: ApiError


Item = Delta | PrefillUpdate | End | CallFault


class BackgroundTasks:
    """Work that must be done although nobody waits for it any more."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, chore: Coroutine[Any, Any, None], *, name: str) -> None:
        task = asyncio.create_task(chore, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def finish(self) -> None:
        """Wait until all of it is done."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed", task.get_name(), exc_info=error)


@dataclass(frozen=True, slots=True)
class Choice:
    """One request of a call, accepted."""

    index: int
    handle: RequestHandle
    text: TextStream
    has_logprobs: bool = False


class Meter(Protocol):
    """Counts one call; each of its requests ends once."""

    def tokens(self, index: int, count: int) -> None:
        """Tokens of one choice have arrived."""

    def ended(self, how: str) -> None:
        """One request has ended."""


class Answer:
    """All choices of one call, read side by side. `release` must be called once, whatever happened."""

    def __init__(self, choices: Sequence[Choice], chores: BackgroundTasks, meter: Meter) -> None:
        self._chores = chores
        self._meter = meter
        self.accepted = choices[-1].handle.accepted
        """What ACCEPT said last, after all choices of the call were counted."""
        self.call_id = choices[0].handle.accepted.request_id
        """The id the call has in the queue: an older call's where its idempotency key was known."""
        self._items: asyncio.Queue[Item] = asyncio.Queue(AHEAD)
        self._open = {choice.index: choice for choice in choices}
        self._unfinished = set(self._open)
        """Choices whose last item is not in the queue yet, though it may have been read."""
        self._pumps = [asyncio.create_task(self._pump(choice), name="answer-pump") for choice in choices]

    @property
    def is_over(self) -> bool:
        """Every choice has ended and every item was taken."""
        return not self._unfinished and self._items.empty()

    async def next_items(self, timeout_s: float | None = None) -> list[Item]:
        """At least one item, and whatever else is there already; none when `timeout_s` passes in silence."""
        items: list[Item] = []
        if self._items.empty():
            try:
                async with asyncio.timeout(timeout_s):
                    items.append(await self._items.get())
            except TimeoutError:
                return []
        while not self._items.empty():
            items.append(self._items.get_nowait())
        return items

    def release(self, cause: Cause = "client") -> None:
        """Cancel what has not ended, wherever it is. Does not wait: whoever calls may be cancelled itself."""
        for pump in self._pumps:
            pump.cancel()
        for choice in self._open.values():
            self._chores.spawn(choice.handle.abandon(cause), name="abandon-request")
            self._meter.ended("left")
        self._open.clear()

    def leave(self) -> None:
        """Stop reading; the requests go on, and somebody else reads them. Instead of `release`."""
        for pump in self._pumps:
            pump.cancel()

    async def _pump(self, choice: Choice) -> None:
        try:
            async for item in self._read(choice):
                is_last = isinstance(item, End | CallFault)
                if is_last and self._open.pop(choice.index, None) is not None:
                    self._meter.ended(item.reason if isinstance(item, End) else "failed")
                await self._items.put(item)  # waits for a slow reader, who may never come
                if is_last:
                    self._unfinished.discard(choice.index)
        except Exception:
            logger.exception("an answer could not be read")
            await self._items.put(CallFault(ApiError("The answer could not be read.", code="internal_error")))

    async def _read(self, choice: Choice) -> AsyncIterator[Item]:
        reader = _Reader(choice)
        async for event in choice.handle.events():
            match event:
                case Tokens():
                    delta = reader.take(event)
                    self._meter.tokens(choice.index, len(event.tokens) // 4)
                    if delta.text or delta.logprobs:
                        yield delta
                    if reader.must_stop_itself:
                        self._chores.spawn(choice.handle.abandon("stop"), name="stop-request")
                        yield reader.end("stop", reader.count, Stats())
                        return
                case Progress():
                    yield PrefillUpdate(choice.index, event.done, event.total)
                case Finished(cause=("listener" | "shutdown") as cause):
                    # Not this client's wish: it is there, and its answer breaks off.
                    yield CallFault(interrupted(cause))
                case Finished():
                    last = reader.finish(event)
                    if last.text or last.logprobs:
                        yield last
                    yield reader.end(event.reason, event.length, event.stats)
                case Failed():
                    yield CallFault(from_failed(event))


class _Reader:
    """The text and logprobs of one choice."""

    def __init__(self, choice: Choice) -> None:
        self._index = choice.index
        self._text = choice.text
        self._has_logprobs = choice.has_logprobs
        self._logprobs: list[ShownToken] = []
        self._logprobs_out = 0
        self.count = 0

    @property
    def must_stop_itself(self) -> bool:
        """A stop string is complete that no worker could see, since it has no bytes for these tokens."""
        return self._text.end is not None and not self._text.is_matched_by_worker

    def take(self, event: Tokens) -> Delta:
        tokens = unpack_tokens(event.tokens)
        self.count += len(tokens)
        if self._has_logprobs and event.logprobs is not None:
            self._logprobs += [
                ShownToken(token, entry.logprob, entry.top) for token, entry in zip(tokens, event.logprobs, strict=True)
            ]
        return Delta(self._index, self._text.feed(tokens), self._fresh_logprobs(self._text.shown_tokens))

    def finish(self, event: Finished) -> Delta:
        text = self._text.finish()
        shown = self._text.shown_tokens
        if event.reason == "stop" and self._text.end is None:
            shown = min(shown, self.count - 1)  # the ending token is not part of the text
        return Delta(self._index, text, self._fresh_logprobs(shown))

    def end(self, reason: str, length: int, stats: Stats) -> End:
        return End(self._index, reason, self.count if length < 0 else length, stats)

    def _fresh_logprobs(self, shown: int) -> Sequence[ShownToken]:
        if not self._has_logprobs:
            return ()
        pieces = self._text.pieces[self._logprobs_out : shown]
        fresh = self._logprobs[self._logprobs_out : shown]
        fresh = [token._replace(piece=piece) for token, piece in zip(fresh, pieces, strict=True)]
        self._logprobs_out = max(self._logprobs_out, shown)
        return fresh
