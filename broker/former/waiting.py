"""The former's copy of the waiting streams: reads only what is new, and of every line only a window (see `windows`).

A round reads a bounded number of pages of each stream, whatever waits in the others. Entries that others took away stay
in the copy until a FORM misses them or the lengths are seen to differ; they cost a look and never a double, because the
fence is in FORM.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from redis.asyncio import Redis

from broker import keys
from broker.connection.connect import translated
from broker.errors import WireError
from broker.former.capacity import Waiting
from broker.former.windows import WINDOW, Beyond, EntryKey, QueueName, StreamView, line_of
from broker.wire import WIRE_VERSION, Ticket, decode_ticket

STREAMS = (keys.WAIT_RETURNED, keys.WAIT_INTERACTIVE, keys.WAIT_OFFLINE)
PAGE = 1000
PAGES = 4
"""Pages of one stream that are read in one round."""
OVERDUE_MAX = 100
"""Entries past their deadline that are named in one round."""
RELOAD_S = 1.0
_MIN_WIRE_AT = 8
"""Where `min_wire` stands in a packed ticket, in every version of it."""


@dataclass(frozen=True, slots=True)
class WaitingEntry:
    """One waiting entry, read."""

    key: EntryKey
    request_id: str
    deadline_ms: int
    waiting: Waiting | None
    """None when only a newer former can read it; it is left alone until its deadline."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """One waiting entry that no version can read."""

    key: EntryKey
    raw: Mapping[bytes, bytes]
    why: str


_Page = Sequence[tuple[bytes, Mapping[bytes, bytes]]]


class _Reading(NamedTuple):
    """One page to be read."""

    stream: StreamView
    line: QueueName | None
    """The line that is read on; None: what is new in the stream."""
    min_id: str


class WaitingQueue:
    """The waiting requests, as far as this former knows."""

    def __init__(
        self,
        client: Redis,
        *,
        monotonic: Callable[[], float],
        page: int = PAGE,
        window: int = WINDOW,
        wire: int = WIRE_VERSION,
    ) -> None:
        """`wire` is the highest version that is read; what needs a newer one is left alone."""
        self._client = client
        self._monotonic = monotonic
        self._page = page
        self._window = window
        self._wire = wire
        self.clear()

    def clear(self) -> None:
        """Forget everything; the next `refresh` reads from the start."""
        self.now_ms = 0
        self.unreadable: dict[EntryKey, Unreadable] = {}
        self._streams = {name: StreamView(name, self._window) for name in STREAMS}
        self._entries: dict[EntryKey, WaitingEntry] = {}
        self._by_request: dict[str, list[EntryKey]] = {}
        self._deadlines: list[tuple[int, EntryKey]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def has_any(self, stream_name: str) -> bool:
        """Whether anything waits in a stream."""
        return bool(self._streams[stream_name].entry_keys)

    @property
    def is_behind(self) -> bool:
        """Whether there is more to read, or more past its deadline, without anything new having come."""
        is_unread = any(stream.has_more or stream.hungry for stream in self._streams.values())
        return is_unread or bool(self._deadlines and self._deadlines[0][0] <= self.now_ms)

    @property
    def waiting(self) -> Iterator[Waiting]:
        """The oldest requests of every line."""
        return (entry.waiting for entry in self._entries.values() if entry.waiting is not None)

    @property
    def beyond(self) -> list[Beyond]:
        """What waits besides."""
        return [beyond for stream in self._streams.values() for beyond in stream.beyond()]

    def find(self, request_ids: Iterable[str]) -> list[WaitingEntry]:
        """The entries of these requests."""
        return [self._entries[key] for request_id in request_ids for key in self._by_request.get(request_id, ())]

    def overdue(self) -> list[WaitingEntry]:
        """Entries whose deadline has passed, a bounded number; each is returned until it is dropped."""
        found: list[WaitingEntry] = []
        while self._deadlines and self._deadlines[0][0] <= self.now_ms and len(found) < OVERDUE_MAX:
            _, key = heapq.heappop(self._deadlines)
            if key in self._entries:
                found.append(self._entries[key])
        for entry in found:
            heapq.heappush(self._deadlines, (entry.deadline_ms, entry.key))
        return found

    def drop(self, entries: Iterable[WaitingEntry]) -> None:
        """These no longer wait."""
        for entry in entries:
            self._forget(entry.key)

    async def refresh(self) -> None:
        """Read what is new, what lines that ran low have behind them, and Redis' clock."""
        unread = list(self._streams.values())
        for _ in range(PAGES):
            await self._read_pages(unread)
            unread = [stream for stream in unread if stream.has_more or stream.hungry]
            if not unread:
                return

    async def _read_pages(self, streams: list[StreamView]) -> None:
        """One page of each stream, and one of each line that ran low."""
        readings = [_Reading(stream, None, f"({stream.last_id}") for stream in streams]
        readings += [_Reading(stream, *hungry) for stream in streams for hungry in stream.hungry]
        with translated():
            # One transaction: a length and a page of different moments would differ for no reason.
            pipe = self._client.pipeline(transaction=True)
            for stream, line, min_id in readings:
                pipe.xrange(stream.name, min=min_id, max="+" if line is None else stream.last_id, count=self._page)
            for stream in streams:
                pipe.xlen(stream.name)
            pipe.time()
            *replies, (seconds, micros) = await pipe.execute()
        self.now_ms = int(seconds) * 1000 + int(micros) // 1000
        pages, lengths = replies[: len(readings)], replies[len(readings) :]
        # Lines are read on up to where their streams had been read before: so first.
        for reading, page in sorted(zip(readings, pages, strict=True), key=lambda each: each[0].line is None):
            if reading.line is None:
                self._take_page(reading.stream, page)
            else:
                self._read_on(reading.stream, reading.line, page)
        for stream, length in zip(streams, lengths, strict=True):
            stream.length = length
            self._check_length(stream)

    def _take_page(self, stream: StreamView, page: _Page) -> None:
        for raw_id, raw in page:
            self._add(stream, raw_id.decode(), raw)
        stream.has_more = len(page) == self._page

    def _read_on(self, stream: StreamView, line: QueueName, page: _Page) -> None:
        if line not in stream.windows:
            return
        for raw_id, raw in page:
            key = EntryKey(stream.name, raw_id.decode())
            entry = self._parse(key, raw)
            if entry is None or line_of(entry.waiting) != line or key in self._entries:
                continue
            if not stream.take_again(line, key, entry.waiting):
                return
            self._keep(entry)
        stream.read_on(line, after_id=page[-1][0].decode() if len(page) == self._page else None)

    def _check_length(self, stream: StreamView) -> None:
        """Others took entries that are still kept: read the stream anew, a long one not too often."""
        now_s = self._monotonic()
        is_cheap = len(stream.entry_keys) <= self._page or now_s - stream.reloaded_s >= RELOAD_S
        if not stream.is_wrong or not is_cheap:
            return
        for key in list(stream.entry_keys):
            self._forget(key)
        stream.read_anew(now_s)

    def _add(self, stream: StreamView, entry_id: str, raw: Mapping[bytes, bytes]) -> None:
        key = EntryKey(stream.name, entry_id)
        stream.last_id = entry_id
        entry = self._parse(key, raw)
        if entry is None:
            stream.entry_keys.add(key)
        elif stream.take(key, entry.waiting):
            self._keep(entry)

    def _parse(self, key: EntryKey, raw: Mapping[bytes, bytes]) -> WaitingEntry | None:
        """An entry, read; None when it was set aside because no version can read it."""
        try:
            return _read(key, raw, self._wire)
        except WireError as error:
            self.unreadable[key] = Unreadable(key, raw, str(error))
            return None

    def _keep(self, entry: WaitingEntry) -> None:
        self._entries[entry.key] = entry
        self._by_request.setdefault(entry.request_id, []).append(entry.key)
        heapq.heappush(self._deadlines, (entry.deadline_ms, entry.key))
        if len(self._deadlines) > 2 * len(self._entries) + self._page:
            # Most requests are formed long before their deadline, and must not be remembered until then.
            self._deadlines = [(each.deadline_ms, each.key) for each in self._entries.values()]
            heapq.heapify(self._deadlines)

    def _forget(self, key: EntryKey) -> None:
        stream = self._streams[key.stream]
        if self.unreadable.pop(key, None) is not None:
            stream.entry_keys.discard(key)
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        entry_keys = self._by_request[entry.request_id]
        entry_keys.remove(key)
        if not entry_keys:
            del self._by_request[entry.request_id]
        stream.forget(key, entry.waiting)

    def drop_unreadable(self, unreadable: Unreadable) -> None:
        """It was buried."""
        self._forget(unreadable.key)


def _read(key: EntryKey, raw: Mapping[bytes, bytes], wire: int) -> WaitingEntry:
    try:
        request_id, deadline_ms = raw[b"id"].decode(), int(raw[b"deadline_ms"])
        ticket = _ticket(raw[b"ticket"], wire)
        waiting = None if ticket is None else _waiting(key, raw, ticket)
    except KeyError as error:
        raise WireError(f"a waiting entry lacks the field {error}") from error
    except ValueError:
        raise WireError("a waiting entry has a field that cannot be read") from None  # its text would quote the field
    if ticket is not None and ticket.id != request_id:
        raise WireError("a waiting entry carries the ticket of another request")
    return WaitingEntry(key, request_id, deadline_ms, waiting)


def _waiting(key: EntryKey, raw: Mapping[bytes, bytes], ticket: Ticket) -> Waiting:
    return Waiting(
        ticket=ticket,
        ordinal=int(raw[b"ordinal"]),
        accepted_ms=int(raw[b"accepted_ms"]),
        crashes=int(raw[b"crashes"]),
        committed=int(raw[b"committed"]),
        is_returned=key.stream == keys.WAIT_RETURNED,
    )


def _ticket(packed: bytes, wire: int) -> Ticket | None:
    """None when it says that only a newer version reads it.

    Raises:
        WireError: it is of no version.
    """
    try:
        ticket = decode_ticket(packed)
    except WireError:
        if _min_wire(packed) > wire:
            return None
        raise
    return ticket if ticket.min_wire <= wire else None


def _min_wire(packed: bytes) -> int:
    try:
        parts: Any = msgspec.msgpack.decode(packed)
    except msgspec.MsgspecError:
        return 0
    is_long_enough = isinstance(parts, list) and len(parts) > _MIN_WIRE_AT
    return parts[_MIN_WIRE_AT] if is_long_enough and isinstance(parts[_MIN_WIRE_AT], int) else 0
