"""From token ids to the bytes they stand for, read out of a `tokenizer.json`.

Pure: bytes in, a table out. Knows the two families whose tokens have bytes of their own, byte-level and
byte-fallback; for any other decoder there is no table, because there a token's text depends on its neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from broker.errors import WireError

ByteTable = tuple[bytes, ...]
"""Bytes by token id; empty for special tokens and for ids nobody defined."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _Decoder(msgspec.Struct):
    """The fields of every decoder kind that matters here, all optional but `type`."""

    type: str
    decoders: list[_Decoder] = []
    pattern: dict[str, Any] = {}
    content: str = ""
    stop: int = 0
    replacement: str = "▁"


class _TokenizerFile(msgspec.Struct):
    model: _Model
    decoder: _Decoder | None = None
    added_tokens: list[_AddedToken] = []


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_table(tokenizer_json: bytes) -> ByteTable | None:
    """The bytes of every token, or None where the decoder gives tokens no bytes of their own.

    The text of a completion is the join of its tokens' bytes: it continues the prompt, so a leading space that a
    decoder would strip at the start of a text stays.

    Raises:
        WireError: these bytes are no `tokenizer.json`.
    """
    try:
        file = msgspec.json.decode(tokenizer_json, type=_TokenizerFile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"not a tokenizer.json: {error}") from error
    steps = _flatten(file.decoder)
    kinds = {step.type for step in steps}
    if "ByteLevel" in kinds:
        return _fill(file, _ByteLevel()) if kinds <= {"ByteLevel", "Fuse"} else None
    if not steps or not all(_has_bytes(step) for step in steps):
        return None
    return _fill(file, _Pieces(steps))


def text_of(table: ByteTable, tokens: Iterable[int]) -> bytes:
    """The bytes of some tokens, in order; ids outside the table have none."""
    size = len(table)
    return b"".join([table[token] for token in tokens if token < size])


class _ByteLevel:
    """Every character of a token stands for one byte, by GPT-2's alphabet."""

    def __init__(self) -> None:
        self._bytes = byte_level_alphabet()

    def __call__(self, token: str) -> bytes:
        try:
            return bytes([self._bytes[character] for character in token])
        except KeyError:
            return token.encode(errors="replace")


class _Pieces:
    """A token is text with marks for spaces, or `<0xNN>` for one byte."""

    def __init__(self, steps: Sequence[_Decoder]) -> None:
        self._replacements = [pair for step in steps if (pair := _replacement(step))]
        self._has_fallback = any(step.type == "ByteFallback" for step in steps)

    def __call__(self, token: str) -> bytes:
        if self._has_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode(errors="replace")


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's characters and their bytes: printable Latin-1 stands for itself, the rest is moved past U+00FF."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    moved = (byte for byte in range(256) if byte not in printable)
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(moved)})
    return alphabet


def _fill(file: _TokenizerFile, to_bytes: _ByteLevel | _Pieces) -> ByteTable:
    vocab = file.model.vocab
    pieces = vocab if isinstance(vocab, dict) else {piece: index for index, (piece, _) in enumerate(vocab)}
    size = 1 + max(max(pieces.values(), default=-1), max((token.id for token in file.added_tokens), default=-1))
    table = [b""] * size
    for piece, index in pieces.items():
        table[index] = to_bytes(piece)
    # Added tokens are matched as plain text before the model sees it, so their content is text already.
    for token in file.added_tokens:
        table[token.id] = b"" if token.special else token.content.encode(errors="replace")
    return tuple(table)


def _flatten(decoder: _Decoder | None) -> list[_Decoder]:
    if decoder is None:
        return []
    if decoder.type != "Sequence":
        return [decoder]
    return [step for inner in decoder.decoders for step in _flatten(inner)]


def _has_bytes(step: _Decoder) -> bool:
    """Whether this decoding step leaves each token its own bytes (but for a strip at the very start)."""
    match step.type:
        case "ByteFallback" | "Fuse" | "Metaspace":
            return True
        case "Replace":
            return "String" in step.pattern
        case "Strip":
            return step.stop == 0
        case _:
            return False


def _replacement(step: _Decoder) -> tuple[str, str] | None:
    match step.type:
        case "Metaspace":
            return step.replacement, " "
        case "Replace":
            return step.pattern["String"], step.content
        case _:
            return None
