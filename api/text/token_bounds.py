"""How many bytes of a text one token can stand for, read out of a `tokenizer.json`: what tells from the size of a
text alone that it has too many tokens. Pure; says nothing where a tokenizer may drop text or join it at will.
"""

from __future__ import annotations

import msgspec

from broker.text.token_bytes import ByteTable

_GROWTH = {"NFC": 4}
"""How many times shorter each kind of normalizer can make a text; Unicode's worst for NFC is seven bytes that become
two."""
_SPLITTERS = frozenset({"ByteLevel", "Digits", "Punctuation", "Split"})


class _Step(msgspec.Struct):
    """The fields of every kind of normalizer and pre-tokenizer that matter here, all optional but `type`."""

    type: str
    behavior: str = ""
    normalizers: list[_Step] = []
    pretokenizers: list[_Step] = []


class _AddedToken(msgspec.Struct):
    content: str
    lstrip: bool = False
    rstrip: bool = False


class _Model(msgspec.Struct):
    type: str = ""
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class _TokenizerFile(msgspec.Struct):
    model: _Model
    normalizer: _Step | None = None
    pre_tokenizer: _Step | None = None
    added_tokens: list[_AddedToken] = []


def bytes_per_token(tokenizer_json: bytes, table: ByteTable | None) -> int | None:
    """The most bytes of a text that one token can stand for; None where there is no such bound, or none is known.

    Args:
        table: what `byte_table` says of the same file.
    """
    if table is None:
        return None
    try:
        file = msgspec.json.decode(tokenizer_json, type=_TokenizerFile)
    except msgspec.ValidationError:
        return None  # an unusual file, which the tokenizers library may take all the same
    growth = _growth(file.normalizer)
    if growth is None or not _knows_every_byte(file, table):
        return None
    if any(token.lstrip or token.rstrip for token in file.added_tokens):
        return None  # such a token swallows all the blanks beside it
    names = (len(token.content.encode(errors="replace")) for token in file.added_tokens)
    return growth * max(max(map(len, table)), max(names, default=0))


def _growth(normalizer: _Step | None) -> int | None:
    steps = [] if normalizer is None else _flatten(normalizer)
    growth = 1
    for step in steps:
        if step.type not in _GROWTH:
            return None
        growth *= _GROWTH[step.type]
    return growth


def _knows_every_byte(file: _TokenizerFile, table: ByteTable) -> bool:
    """Whether no part of a text can be dropped, or become an unknown token of any length."""
    steps = [] if file.pre_tokenizer is None else _flatten(file.pre_tokenizer)
    kinds = {step.type for step in steps}
    is_whole = "ByteLevel" in kinds and kinds <= _SPLITTERS and all(step.behavior != "Removed" for step in steps)
    model = file.model
    is_plain = model.type == "BPE" and not model.continuing_subword_prefix and not model.end_of_word_suffix
    return is_whole and is_plain and {bytes([byte]) for byte in range(256)} <= set(table)


def _flatten(step: _Step) -> list[_Step]:
    if step.type != "Sequence":
        return [step]
    return [part for inner in (*step.normalizers, *step.pretokenizers) for part in _flatten(inner)]
