"""What the host can tell of a cycle before it builds it, where no other cycle is in flight. Imports no MLX."""

from __future__ import annotations

from collections.abc import Iterable


class SeenPairs:
    """Whether a row's last two tokens stood together earlier, which is when prompt lookup finds something."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] = set()
        self._last: int | None = None
        self._pair: tuple[int, int] | None = None
        self.is_repeated = False

    def extend(self, tokens: Iterable[int]) -> None:
        """Take the row's next tokens in."""
        for token in tokens:
            if self._pair is not None:
                self._seen.add(self._pair)
            if self._last is not None:
                self._pair = (self._last, token)
            self._last = token
        self.is_repeated = self._pair in self._seen
