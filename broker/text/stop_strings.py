"""Stop strings matched on bytes, as they come. Pure.

The worker runs it between step and COMMIT to know where a text ends, the API runs it to hold text back. The answer
does not depend on how the bytes were cut into pieces: the text ends where the first stop string to be complete
begins, and of several complete at the same byte the longest counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class ReleasedText(NamedTuple):
    """What one piece of text released."""

    safe: bytes
    """May be shown: no stop string that is complete or still possible reaches into it."""
    end: int | None
    """Byte of the whole text where it ends, once a stop string is complete."""


class StopMatcher:
    """Matches one text against its stop strings."""

    def __init__(self, stops: Iterable[bytes]) -> None:
        self._stops = tuple({stop for stop in stops if stop})
        self._first = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = b""
        self._shown = 0
        self._end: int | None = None

    @property
    def end(self) -> int | None:
        """Byte where the text ends; None while no stop string is complete."""
        return self._end

    def feed(self, data: bytes, *, may_end: bool = True) -> ReleasedText:
        """Take the next bytes of the text. After a match nothing more is released.

        Where `may_end` is false, a stop string that is complete within these bytes counts for nothing; one that is
        complete behind them counts, wherever it begins.
        """
        if self._end is not None:
            return ReleasedText(b"", self._end)
        if not self._stops:
            self._shown += len(data)
            return ReleasedText(data, None)
        text = self._held + data
        found = self._find(text, behind=len(self._held)) if may_end else None
        keep = found if found is not None else len(text) - self._possible(text)
        if found is not None:
            self._end = self._shown + found
        self._shown += keep
        self._held = text[keep:]
        return ReleasedText(text[:keep], self._end)

    def flush(self) -> bytes:
        """Release what was held back, because the text is over without a stop string."""
        held = b"" if self._end is not None else self._held
        self._held = b""
        self._shown += len(held)
        return held

    def _find(self, text: bytes, *, behind: int) -> int | None:
        """Where the stop string begins that is complete first, of those that are not complete in `text[:behind]`."""
        found = [(text.find(stop, max(0, behind + 1 - len(stop))), stop) for stop in self._stops]
        matches = [(start + len(stop), start) for start, stop in found if start >= 0]
        return min(matches)[1] if matches else None

    def _possible(self, text: bytes) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = min(self._longest - 1, len(text))
        for size in range(longest, 0, -1):
            if text[-size] in self._first and self._begins(text[-size:]):
                return size
        return 0

    def _begins(self, tail: bytes) -> bool:
        return any(stop.startswith(tail) for stop in self._stops)
