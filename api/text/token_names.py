"""How the tokens of a text are named in logprobs, and where each begins in the text. One `TokenNames` per text.

A token that ends within a character has no name of its own: it is called the empty text, and the token that
completes the character is called all that has come since. So the names of a text's tokens, joined, are the text.
"""

from __future__ import annotations

import codecs
from typing import NamedTuple

from api.calls.stream import ShownToken
from api.text.detokenizer import TokenizerText


class TokenName(NamedTuple):
    """A token as answers show it."""

    text: str
    data: list[int] | None
    """Its bytes; None where it has none of its own."""
    offset: int = 0
    """Where it begins in the text, in characters."""


class TokenNames:
    """Names the tokens of one text in their order."""

    def __init__(self, text: TokenizerText) -> None:
        self._text = text
        self._pending = b""
        """What has come since a token last ended with a character."""
        self._length = 0

    def name(self, shown: ShownToken) -> tuple[TokenName, list[TokenName]]:
        """Name the next token, and the alternatives to it."""
        pending = self._pending
        chosen = self._take(shown)
        others = [
            chosen if token == shown.token else self._alternative(pending, token, chosen.offset)
            for token, _ in shown.top
        ]
        return chosen, others

    def _take(self, shown: ShownToken) -> TokenName:
        offset = self._length
        if not shown.piece:
            return self._without_text(shown.token, offset)
        text = _whole(self._pending + shown.piece)
        self._pending = b"" if text else self._pending + shown.piece
        self._length += len(text)
        return TokenName(text, list(shown.piece), offset)

    def _alternative(self, pending: bytes, token: int, offset: int) -> TokenName:
        if self._text.is_special(token):
            return self._without_text(token, offset)
        data = self._text.token_bytes(token)
        return TokenName(_whole(pending + data), list(data), offset)

    def _without_text(self, token: int, offset: int) -> TokenName:
        """A special token is called by its name, though that is no part of the text."""
        if not self._text.is_special(token):
            return TokenName("", None, offset)
        data = self._text.token_bytes(token)
        return TokenName(data.decode("utf-8", "replace"), list(data), offset)


def _whole(data: bytes) -> str:
    """The text of some bytes; empty when they end within a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    return "" if decoder.getstate()[0] else text
