"""How much of a waiting stream the former keeps: of each line a window, so that no line can hide another. Pure.

A line is what may be served in turn: one model, profile and API key, and requests of like cost. Of a longer line the
window has the oldest; the place of the first request behind it is remembered, and read from when the window runs low.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from broker.former.capacity import Waiting

WINDOW = 1000
"""Requests kept of one stream if it is one line; more lines have smaller windows each."""
LEAST = 64
"""Requests kept of a line, however many lines there are."""
CAPACITY = 30_000
"""Requests kept of one stream, all lines together."""
REFILLS = 4
"""Lines of one stream that are read on in one round."""

QueueName = Hashable
NEWER: QueueName = "newer"
"""The line of what only a newer former reads."""


def line_of(waiting: Waiting | None) -> QueueName:
    """The line in which a request waits; costs are alike up to a factor of two."""
    if waiting is None:
        return NEWER
    return (*waiting.pool_key, *waiting.line_key, waiting.cost.bit_length(), waiting.ticket.min_wire)


class EntryKey(NamedTuple):
    """Where an entry is."""

    stream: str
    entry_id: str


@dataclass(slots=True)
class Window:
    """What is known of one line."""

    pool_key: tuple[str, str] | None
    """Model and profile; None where only a newer former can read them."""
    is_offline: bool = False
    kept: int = 0
    kept_tokens: int = 0
    behind: int = 0
    """Requests that were seen and not kept."""
    behind_tokens: int = 0
    resume_id: str | None = None
    """Where the first of them is, as XRANGE takes it; None when nothing is behind the window."""


class Beyond(NamedTuple):
    """Tokens that wait unseen in one line, as far as can be told."""

    pool_key: tuple[str, str]
    is_offline: bool
    tokens: float


@dataclass(slots=True)
class StreamView:
    """One waiting stream, as far as it was read."""

    name: str
    window: int = WINDOW
    """What is kept of it when it is one line."""
    last_id: str = "0-0"
    length: int = 0
    """Its entries in Redis when it was last read."""
    has_more: bool = False
    """Whether there are entries behind `last_id`."""
    entry_keys: set[EntryKey] = field(default_factory=set)
    windows: dict[QueueName, Window] = field(default_factory=dict)
    reloaded_s: float = float("-inf")

    @property
    def is_whole(self) -> bool:
        """Whether everything in it was kept."""
        return not self.has_more and all(window.resume_id is None for window in self.windows.values())

    @property
    def is_wrong(self) -> bool:
        """Whether others took entries that are still kept, for certain."""
        kept = len(self.entry_keys)
        return not self.has_more and (self.length != kept if self.is_whole else self.length < kept)

    @property
    def hungry(self) -> list[tuple[QueueName, str]]:
        """The lines to be read on, the emptiest first, and from where."""
        if len(self.entry_keys) >= CAPACITY:
            return []
        low = self._window_size() // 2
        found = [
            (window.kept, line, window.resume_id)
            for line, window in self.windows.items()
            if window.resume_id is not None and window.kept <= low
        ]
        return [(line, resume_id) for _, line, resume_id in sorted(found, key=lambda each: each[0])[:REFILLS]]

    def take(self, key: EntryKey, waiting: Waiting | None) -> bool:
        """Count an entry that was read for the first time; returns whether it is kept."""
        line, cost = line_of(waiting), 0 if waiting is None else waiting.cost
        window = self.windows.get(line)
        if window is None:
            window = self.windows[line] = _window_for(waiting)
        # While something is behind the window, what is newer still is behind it too.
        if window.resume_id is None and self._has_place(window):
            self._keep(window, key, cost)
            return True
        window.behind += 1
        window.behind_tokens += cost
        window.resume_id = window.resume_id or key.entry_id
        return False

    def take_again(self, line: QueueName, key: EntryKey, waiting: Waiting | None) -> bool:
        """Keep an entry of this line that was behind its window; returns False when the window is full again."""
        window, cost = self.windows[line], 0 if waiting is None else waiting.cost
        if not self._has_place(window):
            window.resume_id = key.entry_id
            return False
        window.behind = max(window.behind - 1, 0)
        window.behind_tokens = max(window.behind_tokens - cost, 0)
        self._keep(window, key, cost)
        return True

    def read_on(self, line: QueueName, *, after_id: str | None) -> None:
        """A page was read of what is behind a window, all of it up to this id; None: to the end."""
        window = self.windows[line]
        window.resume_id = None if after_id is None else f"({after_id}"
        if after_id is None:
            window.behind = window.behind_tokens = 0
            self._drop_if_empty(line, window)

    def forget(self, key: EntryKey, waiting: Waiting | None) -> None:
        """An entry is kept no longer."""
        if key not in self.entry_keys:
            return
        self.entry_keys.discard(key)
        line = line_of(waiting)
        window = self.windows.get(line)
        if window is not None:
            window.kept -= 1
            window.kept_tokens -= 0 if waiting is None else waiting.cost
            self._drop_if_empty(line, window)

    def read_anew(self, now_s: float) -> None:
        """Nothing is known of it any more; the next page is the first."""
        self.last_id, self.has_more, self.reloaded_s = "0-0", True, now_s
        self.entry_keys.clear()
        self.windows.clear()

    def beyond(self) -> Iterator[Beyond]:
        """What waits behind the windows; where a stream has not been read to its end, as if the rest were alike."""
        unseen = self.length - len(self.entry_keys)
        behind = sum(window.behind for window in self.windows.values())
        count = behind or len(self.entry_keys)
        if unseen <= 0 or not count:
            return
        for window in self.windows.values():
            tokens = window.behind_tokens if behind else window.kept_tokens
            if window.pool_key is not None and tokens:
                yield Beyond(window.pool_key, window.is_offline, tokens * unseen / count)

    def _keep(self, window: Window, key: EntryKey, cost: int) -> None:
        self.entry_keys.add(key)
        window.kept += 1
        window.kept_tokens += cost

    def _has_place(self, window: Window) -> bool:
        return window.kept < self._window_size() and len(self.entry_keys) < CAPACITY

    def _window_size(self) -> int:
        return max(min(LEAST, self.window), self.window // max(len(self.windows), 1))

    def _drop_if_empty(self, line: QueueName, window: Window) -> None:
        if not window.kept and window.resume_id is None:
            del self.windows[line]


def _window_for(waiting: Waiting | None) -> Window:
    return Window(None) if waiting is None else Window(waiting.pool_key, waiting.is_offline)
