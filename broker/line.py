"""The former's copy of the waiting streams: reads only what is new, so that nothing in front can hide what is behind.

Entries that others took away stay in the copy until a FORM misses them or the lengths are seen to differ; they cost
a look and never a double, because the fence is in FORM.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from redis.asyncio import Redis

from broker import keys
from broker.connection import translated
from broker.errors import WireError
from broker.rooms import Waiting
from broker.wire import WIRE_VERSION, Ticket, decode_ticket

STREAMS = (keys.WAIT_RETURNED, keys.WAIT_INTERACTIVE, keys.WAIT_OFFLINE)
PAGE = 1000
CAPACITY = 30_000
"""Entries kept in the copy, all streams together; what is behind them waits in Redis."""
RELOAD_S = 1.0
_MIN_WIRE_AT = 8
"""Where `min_wire` stands in a packed ticket, in every version of it."""


class EntryKey(NamedTuple):
    """Where an entry is."""

    stream: str
    entry_id: str


@dataclass(frozen=True, slots=True)
class Entry:
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


@dataclass(slots=True)
class _Stream:
    name: str
    last_id: str = "0-0"
    entry_keys: set[EntryKey] = field(default_factory=set)
    reloaded_s: float = float("-inf")


class Line:
    """The waiting requests, as far as this former knows."""

    def __init__(
        self,
        client: Redis,
        *,
        monotonic: Callable[[], float],
        page: int = PAGE,
        capacity: int = CAPACITY,
        wire: int = WIRE_VERSION,
    ) -> None:
        """`wire` is the highest version that is read; what needs a newer one is left alone."""
        self._client = client
        self._monotonic = monotonic
        self._page = page
        self._capacity = capacity
        self._wire = wire
        self.clear()

    def clear(self) -> None:
        """Forget everything; the next `refresh` reads from the start."""
        self.now_ms = 0
        self.unreadable: dict[EntryKey, Unreadable] = {}
        self._streams = [_Stream(name) for name in STREAMS]
        self._entries: dict[EntryKey, Entry] = {}
        self._by_request: dict[str, list[EntryKey]] = {}
        self._deadlines: list[tuple[int, EntryKey]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def has_any(self, stream_name: str) -> bool:
        """Whether anything waits in a stream."""
        return any(stream.entry_keys for stream in self._streams if stream.name == stream_name)

    @property
    def waiting(self) -> Iterator[Waiting]:
        return (entry.waiting for entry in self._entries.values() if entry.waiting is not None)

    def find(self, request_ids: Iterable[str]) -> list[Entry]:
        """The entries of these requests."""
        return [self._entries[key] for request_id in request_ids for key in self._by_request.get(request_id, ())]

    def overdue(self) -> list[Entry]:
        """Entries whose deadline has passed; each is returned until it is dropped."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= self.now_ms:
            _, key = heapq.heappop(self._deadlines)
            if key in self._entries:
                found.append(self._entries[key])
        for entry in found:
            heapq.heappush(self._deadlines, (entry.deadline_ms, entry.key))
        return found

    def drop(self, entries: Iterable[Entry]) -> None:
        """These no longer wait."""
        for entry in entries:
            self._forget(entry.key)

    async def refresh(self) -> None:
        """Read what is new, and Redis' clock."""
        is_full = len(self._entries) >= self._capacity
        unread = await self._read_pages([] if is_full else list(self._streams))
        while unread and len(self._entries) < self._capacity:
            unread = await self._read_pages(unread)

    async def _read_pages(self, streams: list[_Stream]) -> list[_Stream]:
        """One page of each stream; returns those that have more."""
        with translated():
            # One transaction: a length and a page of different moments would differ for no reason.
            pipe = self._client.pipeline(transaction=True)
            for stream in streams:
                pipe.xrange(stream.name, min=f"({stream.last_id}", count=self._page)
                pipe.xlen(stream.name)
            pipe.time()
            *replies, (seconds, micros) = await pipe.execute()
        self.now_ms = int(seconds) * 1000 + int(micros) // 1000
        pages = zip(streams, replies[::2], replies[1::2], strict=True)
        return [stream for stream, page, length in pages if self._take_page(stream, page, length)]

    def _take_page(self, stream: _Stream, page: list[tuple[bytes, dict[bytes, bytes]]], length: int) -> bool:
        """Take one page into the copy; returns whether there is more to read."""
        for raw_id, raw in page:
            self._add(stream, raw_id.decode(), raw)
        if len(page) == self._page:
            return True
        now_s = self._monotonic()
        is_cheap = len(stream.entry_keys) <= self._page or now_s - stream.reloaded_s >= RELOAD_S
        if length == len(stream.entry_keys) or not is_cheap:
            return False
        for key in list(stream.entry_keys):
            self._forget(key)
        stream.last_id, stream.reloaded_s = "0-0", now_s
        return True

    def _add(self, stream: _Stream, entry_id: str, raw: Mapping[bytes, bytes]) -> None:
        key = EntryKey(stream.name, entry_id)
        stream.last_id = entry_id
        stream.entry_keys.add(key)
        try:
            entry = _read(key, raw, self._wire)
        except WireError as error:
            self.unreadable[key] = Unreadable(key, raw, str(error))
            return
        self._entries[key] = entry
        self._by_request.setdefault(entry.request_id, []).append(key)
        heapq.heappush(self._deadlines, (entry.deadline_ms, key))
        if len(self._deadlines) > 2 * len(self._entries) + self._page:
            # Most requests are formed long before their deadline, and must not be remembered until then.
            self._deadlines = [(each.deadline_ms, each.key) for each in self._entries.values()]
            heapq.heapify(self._deadlines)

    def _forget(self, key: EntryKey) -> None:
        self.unreadable.pop(key, None)
        entry = self._entries.pop(key, None)
        if entry is not None:
            entry_keys = self._by_request[entry.request_id]
            entry_keys.remove(key)
            if not entry_keys:
                del self._by_request[entry.request_id]
        next(stream for stream in self._streams if stream.name == key.stream).entry_keys.discard(key)

    def drop_unreadable(self, unreadable: Unreadable) -> None:
        """It was buried."""
        self._forget(unreadable.key)


def _read(key: EntryKey, raw: Mapping[bytes, bytes], wire: int) -> Entry:
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
    return Entry(key, request_id, deadline_ms, waiting)


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
