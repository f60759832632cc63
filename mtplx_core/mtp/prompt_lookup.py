"""Prompt lookup on the host, for cycles that are built when the one before has been read. Imports no MLX."""

from __future__ import annotations

from collections.abc import Iterable


class TokenIndex:
    """A row's tokens by what stood before them; finds what `drafters.look_up` finds on the device."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}
        """Where each two and three tokens in a row were followed by something, the latest place."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Take the row's next tokens in."""
        for token in tokens:
            end = len(self._tokens)
            for length in (2, 3):
                if end >= length:
                    self._behind[tuple(self._tokens[-length:])] = end
            self._tokens.append(token)

    def guess(self, depth: int) -> tuple[int, ...] | None:
        """So many tokens behind the last ones, going in circles where they run past the end; None: nothing is found."""
        three, two = tuple(self._tokens[-3:]), tuple(self._tokens[-2:])
        start = self._behind.get(three, self._behind.get(two))
        if start is None:
            return None
        period = len(self._tokens) - start
        return tuple(self._tokens[start + step % period] for step in range(depth))
