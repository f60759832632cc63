"""Control tokens that a message only mentions, such as `<|im_end|>` in a question about templates: they stay text.

A tokenizer finds its control tokens wherever they are written. So before a template is rendered the messages have
theirs broken up by a stand-in, and afterwards those that are still whole are the template's own. They get a mark,
the stand-ins go, and a tokenizer that knows control tokens by their marked names alone takes the rest for text. It
splits the same text in the same places otherwise.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer

_BRACKETED = re.compile(r"<[^\s<>].*>|\[[^\s\[\]].*\]", re.DOTALL)
"""Added tokens of this form are control tokens though the tokenizer does not say so; others are common text."""
_MARKUP = re.compile(r"</?\w[\w:]*>", re.ASCII)
"""Those with which a model marks up its own answers, such as `<think>`; templates look for them there."""
_STAND_INS = range(0xE000, 0xF8FF)
"""Characters for private use."""


class UnguardedError(Exception):
    """This tokenizer cannot be told to take a control token for text."""


class ControlTokens:
    """The control tokens of one tokenizer."""

    def __init__(self, added: Mapping[int, AddedToken]) -> None:
        long = [token for token in added.values() if len(token.content) > 1 and token.content.strip()]
        self.names = frozenset(t.content for t in long if t.special or _BRACKETED.fullmatch(t.content))
        markup = {token.content for token in long if not token.special and _MARKUP.fullmatch(token.content)}
        self.turns = self.names - markup
        """Those that count in a model's own words too."""
        self._lengths = sorted({len(name) for name in self.names}, reverse=True)
        firsts = "".join(re.escape(first) for first in sorted({name[0] for name in self.names}))
        self._firsts = re.compile(f"[{firsts}]") if firsts else re.compile(r"(?!)")

    def occur_in(self, text: str) -> bool:
        return next(self._find(text, self.names), None) is not None

    def break_up(self, text: str, stand_in: str, *, is_models_own: bool) -> str:
        """The text with a stand-in around every character of its control tokens.

        Args:
            is_models_own: the text is an earlier answer, whose markup is the template's to read.
        """
        return self._replace(
            text, self.turns if is_models_own else self.names, lambda name: stand_in + stand_in.join(name) + stand_in
        )

    def mark(self, text: str, mark: str) -> str:
        """The text with a mark before every control token that is whole."""
        return self._replace(text, self.names, lambda name: mark + name)

    def _replace(self, text: str, names: Collection[str], change: Any) -> str:
        parts, at = [], 0
        for start, end in self._find(text, names):
            parts += [text[at:start], change(text[start:end])]
            at = end
        return "".join([*parts, text[at:]])

    def _find(self, text: str, names: Collection[str]) -> Iterator[tuple[int, int]]:
        """Where control tokens stand: the leftmost first, and the longest of those that begin there."""
        at = 0
        for match in self._firsts.finditer(text):
            start = match.start()
            length = next((size for size in self._lengths if text[start : start + size] in names), 0)
            if start >= at and length:
                at = start + length
                yield start, at


def unused_character(texts: Iterable[str]) -> str:
    """A character for private use that occurs in none of these texts."""
    used = frozenset().union(*map(frozenset, texts))
    return next(chr(code) for code in _STAND_INS if chr(code) not in used)


def without_character(text: str, character: str) -> str:
    """The text without this character, also where a template wrote it as JSON."""
    return text.replace(character, "").replace(f"\\u{ord(character):04x}", "")


class GuardedTokenizer:
    """A tokenizer to which a control token without its mark is text."""

    def __init__(self, tokenizer: Tokenizer, controls: ControlTokens) -> None:
        """Raises: UnguardedError."""
        self.mark = f"\N{OBJECT REPLACEMENT CHARACTER}{secrets.token_hex(16)}"
        """Not to be guessed, so that no message can write a marked control token itself."""
        file = json.loads(tokenizer.to_str())
        _rename(file, controls.names, self.mark)
        try:
            self._tokenizer = Tokenizer.from_str(json.dumps(file))
        except Exception as error:  # the library raises bare Exception
            raise UnguardedError(str(error)) from error
        for name in controls.names:
            if self.encode(self.mark + name) != tokenizer.encode(name, add_special_tokens=False).ids:
                raise UnguardedError(f"the tokenizer would not know {name!r} any more")

    def encode(self, text: str) -> list[int]:
        # Of the library's methods only those for batches release the interpreter while they work.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)


def _rename(file: dict[str, Any], names: Collection[str], mark: str) -> None:
    """Give control tokens marked names, among the added tokens and in the model, which knows some by the same id."""
    model = file["model"]
    for token in file["added_tokens"]:
        if token["content"] in names:
            token["content"] = mark + token["content"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {mark + name if name in names else name: index for name, index in vocab.items()}
    else:
        model["vocab"] = [[mark + piece if piece in names else piece, score] for piece, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = mark + model["unk_token"]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, names)]
    file["post_processor"] = None  # it may name control tokens, and adds none here


def _makes(merge: str | list[str], names: Collection[str]) -> bool:
    """Whether a merge makes a control token of text, or something of one."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left + right in names or left in names or right in names
