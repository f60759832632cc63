"""Where the text of one completion ends: stop strings on token bytes, and tokens that are no text. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from broker.text.stop_strings import StopMatcher
from broker.text.token_bytes import ByteTable, text_of

UNKNOWN_END = -1


class KeptTokens(NamedTuple):
    """What became of some tokens."""

    size: int
    """How many belong to the completion; what follows a stop string does not."""
    is_stopped: bool
    """Whether a stop string is complete with the last token kept."""


class StopDetector:
    """Follows one row's bytes. Without a table it keeps everything and knows no end."""

    def __init__(
        self, table: ByteTable | None, *, stops: Iterable[bytes], ending: Collection[int], min_tokens: int = 0
    ) -> None:
        self._table = table
        self._ending = ending
        """Tokens that end a row and are no text."""
        self._matcher = StopMatcher(stops)
        self._has_stops = any(stops)
        self._bytes = 0
        self._barred = min_tokens
        """Next tokens with which no stop string ends the text."""

    @property
    def end(self) -> int:
        """Byte of the completion's text where it ends, as far as it has come."""
        if self._table is None:
            return UNKNOWN_END
        return self._bytes if self._matcher.end is None else self._matcher.end

    def feed(self, tokens: Sequence[int]) -> KeptTokens:
        """Take the next tokens."""
        if self._table is None:
            return KeptTokens(len(tokens), is_stopped=False)
        for index, token in enumerate(tokens):
            may_end = self._barred <= 0
            self._barred -= 1
            if token in self._ending:
                continue
            data = text_of(self._table, (token,))
            self._bytes += len(data)
            if self._has_stops and self._matcher.feed(data, may_end=may_end).end is not None:
                return KeptTokens(index + 1, is_stopped=True)
        return KeptTokens(len(tokens), is_stopped=False)
