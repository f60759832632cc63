"""Names and places of tokens in logprobs, where tokens have bytes of their own and where not. Engine: none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.calls.stream import ShownToken
from api.text.detokenizer import TextRules, TokenizerText
from api.text.token_names import TokenName, TokenNames
from tests.api.fake import encode, tokenizer_files
from tests.api.text.test_detokenizer import word_pieces

BYTES = TokenizerText(tokenizer_files()["tokenizer.json"])
WORDS = TokenizerText(word_pieces().to_str().encode())


def named(
    text: TokenizerText, tokens: list[int], *, top: tuple[int, ...] = ()
) -> list[tuple[TokenName, list[TokenName]]]:
    stream = text.stream(TextRules(tracks_tokens=True))
    stream.feed(tokens)
    names = TokenNames(text)
    shown = [ShownToken(t, 0.0, [(o, 0.0) for o in top], p) for t, p in zip(tokens, stream.pieces, strict=True)]
    return [names.name(token) for token in shown]


@given(st.text(max_size=30))
def test_names_joined_are_the_text_and_each_stands_at_its_place(text: str) -> None:
    names = [name for name, _ in named(BYTES, encode(text)) if "<|" not in name.text]

    whole = "".join(name.text for name in names)
    assert whole == BYTES.stream(TextRules()).feed(encode(text))
    assert all(whole[name.offset :].startswith(name.text) for name in names)


def test_names_of_pieces_without_bytes_are_what_they_add_to_the_text() -> None:
    names = [name for name, _ in named(WORDS, WORDS.encode("hello world! foo", add_special_tokens=False))]

    assert [name.text for name in names] == ["hello", " wor", "ld", "!", " foo"]
    assert [name.offset for name in names] == [0, 5, 9, 11, 12]


def test_alternative_that_would_complete_a_character_is_named_by_it() -> None:
    tokens = encode("漢")
    assert len(tokens) > 1

    *_, (_, others) = named(BYTES, tokens, top=(tokens[-1], tokens[0], encode("a")[0], 0))

    assert [other.text for other in others[:2]] == ["漢", ""]
    assert others[2].text.endswith("a")
    assert others[3].text == "<|endoftext|>"
    assert bytes(others[3].data or []) == b"<|endoftext|>"


@pytest.mark.parametrize("special", ["<|endoftext|>", "<|im_start|>"])
def test_special_token_has_a_name_and_takes_no_place(special: str) -> None:
    names = [name for name, _ in named(BYTES, encode(f"a{special}b"))]

    assert [(name.text, name.offset) for name in names] == [("a", 0), (special, 1), ("b", 1)]
