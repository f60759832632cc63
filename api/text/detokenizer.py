"""Text to tokens and back, for one model's tokenizer files.

A `TextStream` turns the tokens of one completion into text as they come: it holds back what a stop string may
still take, and half a character. Where tokens have bytes of their own it works on those; for other decoders it
asks the tokenizers library.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from api.text.control_tokens import ControlTokens, GuardedTokenizer
from api.text.token_bounds import bytes_per_token
from broker.errors import WireError
from broker.text.stop_strings import StopMatcher
from broker.text.token_bytes import ByteTable, byte_table, text_of


@dataclass(frozen=True, slots=True)
class TextRules:
    """What one completion asks of its text."""

    stops: Sequence[bytes] = ()
    hidden: frozenset[int] = frozenset()
    """Tokens that end the text and are no part of it."""
    tracks_tokens: bool = False
    min_tokens: int = 0
    """Tokens with which no stop string ends the text."""


class TextStream(Protocol):
    """The text of one completion."""

    @property
    def end(self) -> int | None:
        """Byte where a stop string ended the text; None while none did."""

    @property
    def is_matched_by_worker(self) -> bool:
        """Whether the worker, too, can see stop strings in these tokens."""

    @property
    def shown_tokens(self) -> int:
        """Leading tokens whose text is wholly out; counted only where the rules ask for it."""

    @property
    def pieces(self) -> Sequence[bytes]:
        """What each token has added to the text, in order; kept only where the rules ask for it."""

    def feed(self, tokens: Sequence[int]) -> str:
        """The text these tokens release."""

    def finish(self) -> str:
        """What was still held back, because the completion is over; half a character is left out."""


class TokenizerText:
    """Encodes and decodes with one tokenizer."""

    def __init__(self, tokenizer_json: bytes) -> None:
        """Raises: WireError when the file cannot be read."""
        self.table: ByteTable | None = byte_table(tokenizer_json)
        try:
            self._tokenizer = Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise WireError(f"not a tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.bytes_per_token: int | None = bytes_per_token(tokenizer_json, self.table)
        """The most bytes of a text that one token can stand for; None where no bound is known."""
        self.controls = ControlTokens(self._tokenizer.get_added_tokens_decoder())

    @cached_property
    def guarded(self) -> GuardedTokenizer:
        """The tokenizer to which unmarked control tokens are text. It takes long to make and few requests need it.

        Raises:
            UnguardedError: it cannot be made.
        """
        return GuardedTokenizer(self._tokenizer, self.controls)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_aside(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The same for a long text, in a thread of its own."""
        # Of the library's methods only those for batches release the interpreter while they work.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def stream(self, rules: TextRules) -> TextStream:
        """The text of a new completion."""
        if self.table is not None:
            return _ByteStream(self.table, rules)
        return _DecodedStream(self._tokenizer, rules)

    def is_special(self, token: int) -> bool:
        """Whether a token is no part of any text."""
        if self.table is not None:
            return not text_of(self.table, (token,))
        added = self._tokenizer.get_added_tokens_decoder().get(token)
        return added is not None and added.special

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; a special token's are its name's."""
        known = text_of(self.table, (token,)) if self.table is not None else b""
        return known or (self._tokenizer.id_to_token(token) or "").encode(errors="replace")


class _Shown:
    """Which tokens are out, by the bytes of text they stand for."""

    def __init__(self) -> None:
        self._pending: deque[tuple[int, int]] = deque()
        self._length = 0
        self.count = 0
        self.pieces: list[bytes] = []

    def add(self, piece: bytes) -> None:
        self._pending.append((self._length, self._length + len(piece)))
        self._length += len(piece)
        self.pieces.append(piece)

    def advance(self, shown: int) -> None:
        """The first `shown` bytes of the text are out. Tokens without bytes wait for the next that has some, since
        the last of them may be the ending token."""
        ready = 0
        for place, (start, end) in enumerate(self._pending, 1):
            if end > shown:
                break
            if end > start:
                ready = place
        self._drop(ready)

    def finish(self, end: int | None) -> None:
        """The text is over, at byte `end` if a stop string ended it; the token across it has its first part out."""
        self._drop(sum(end is None or start < end for start, _ in self._pending))
        self._pending.clear()

    def _drop(self, count: int) -> None:
        self.count += count
        for _ in range(count):
            self._pending.popleft()


class _MatchedText:
    """Bytes in, text out; what both kinds of stream share."""

    def __init__(self, rules: TextRules) -> None:
        self._hidden = rules.hidden
        self._barred = rules.min_tokens
        """Next tokens with which no stop string ends the text."""
        self._matcher = StopMatcher(rules.stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._bytes_out = 0
        self._shown = _Shown() if rules.tracks_tokens else None

    @property
    def end(self) -> int | None:
        return self._matcher.end

    @property
    def shown_tokens(self) -> int:
        return 0 if self._shown is None else self._shown.count

    @property
    def pieces(self) -> Sequence[bytes]:
        return () if self._shown is None else self._shown.pieces

    def finish(self) -> str:
        rest = self._matcher.flush()
        if self._shown is not None:
            self._shown.finish(self.end)
        return self._decoder.decode(rest)  # not as the last bytes: what ends within a character is left out

    def _split(self, tokens: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """The next tokens: those with which the text cannot end yet, and the rest."""
        barred = min(self._barred, len(tokens))
        self._barred -= barred
        return (tokens[:barred], tokens[barred:]) if barred else ((), tokens)

    def _release(self, data: bytes, *, may_end: bool) -> str:
        safe, _ = self._matcher.feed(data, may_end=may_end)
        self._bytes_out += len(safe)
        if self._shown is not None:
            self._shown.advance(self._bytes_out)
        return self._decoder.decode(safe)


class _ByteStream(_MatchedText):
    """Tokens that have bytes of their own."""

    is_matched_by_worker = True

    def __init__(self, table: ByteTable, rules: TextRules) -> None:
        super().__init__(rules)
        self._table = table

    def feed(self, tokens: Sequence[int]) -> str:
        barred, rest = self._split(tokens)
        early = self._feed(barred, may_end=False) if barred else ""
        return early + self._feed(rest, may_end=True)

    def _feed(self, tokens: Sequence[int], *, may_end: bool) -> str:
        visible = tokens if self._hidden.isdisjoint(tokens) else [t for t in tokens if t not in self._hidden]
        if self._shown is not None:
            for token in tokens:
                self._shown.add(b"" if token in self._hidden else text_of(self._table, (token,)))
        return self._release(text_of(self._table, visible), may_end=may_end)


class _DecodedStream(_MatchedText):
    """Tokens whose text depends on their neighbours."""

    is_matched_by_worker = False

    def __init__(self, tokenizer: Tokenizer, rules: TextRules) -> None:
        super().__init__(rules)
        self._tokenizer = tokenizer
        self._decode = DecodeStream(skip_special_tokens=True)

    def feed(self, tokens: Sequence[int]) -> str:
        barred, rest = self._split(tokens)
        early = [self._feed_one(token, may_end=False) for token in barred]
        return "".join([*early, *(self._feed_one(token, may_end=True) for token in rest)])

    def _feed_one(self, token: int, *, may_end: bool) -> str:
        step = None if token in self._hidden else self._decode.step(self._tokenizer, token)
        data = (step or "").encode(errors="replace")
        if self._shown is not None:
            self._shown.add(data)
        return self._release(data, may_end=may_end)
