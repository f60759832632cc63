"""How few tokens a text of some size can have, and where nobody can tell. Engine: none."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from api.text.detokenizer import TokenizerText
from api.text.token_bounds import bytes_per_token
from broker.text.token_bytes import byte_table
from tests.api.fake import tokenizer, tokenizer_files

LONGEST = len("<|endoftext|>")
Change = Callable[[Tokenizer], object]


def with_tokens(*tokens: str | AddedToken) -> Change:
    return lambda made: made.add_tokens(list(tokens))


def normalized(normalizer: normalizers.Normalizer) -> Change:
    return lambda made: setattr(made, "normalizer", normalizer)


def split(*steps: pre_tokenizers.PreTokenizer) -> Change:
    return lambda made: setattr(made, "pre_tokenizer", pre_tokenizers.Sequence(list(steps)))


def bound_of(change: Change) -> int | None:
    made = Tokenizer.from_buffer(tokenizer_files()["tokenizer.json"])
    change(made)
    return TokenizerText(made.to_str().encode()).bytes_per_token


def tokenizer_file() -> dict[str, Any]:
    file: dict[str, Any] = json.loads(tokenizer_files()["tokenizer.json"])
    return file


def told(file: dict[str, Any]) -> int | None:
    data = json.dumps(file).encode()
    return bytes_per_token(data, byte_table(data))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(with_tokens(), LONGEST, id="the name of a special token"),
        pytest.param(with_tokens("é" * 20), 40, id="an added token"),
        pytest.param(normalized(normalizers.NFC()), 4 * LONGEST, id="nfc"),
        pytest.param(normalized(normalizers.Sequence([normalizers.NFC()])), 4 * LONGEST, id="nfc in a sequence"),
        pytest.param(
            split(pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(False)),
            LONGEST,
            id="several splits",
        ),
    ],
)
def test_a_byte_level_tokenizer_has_a_bound(change: Change, expected: int) -> None:
    assert bound_of(change) == expected


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(normalized(normalizers.Strip()), id="a normalizer drops blanks"),
        pytest.param(normalized(normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])), id="in a row"),
        pytest.param(
            split(pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(False)), id="a split drops text"
        ),
        pytest.param(
            split(pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(False)), id="a splitter drops blanks"
        ),
        pytest.param(split(pre_tokenizers.Digits()), id="no bytes before the model"),
        pytest.param(with_tokens(AddedToken("[a]", rstrip=True)), id="a token takes the blanks behind it"),
        pytest.param(with_tokens(AddedToken("[a]", lstrip=True)), id="a token takes the blanks before it"),
    ],
)
def test_a_tokenizer_that_may_drop_text_has_no_bound(change: Change) -> None:
    assert bound_of(change) is None


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"), id="whole words"),
        pytest.param(models.BPE({"a": 0, "b": 1}, []), id="bytes are missing"),
    ],
)
def test_a_tokenizer_with_unknown_text_has_no_bound(model: models.Model) -> None:
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    made.decoder = decoders.ByteLevel()

    assert TokenizerText(made.to_str().encode()).bytes_per_token is None


@pytest.mark.parametrize("field", ["continuing_subword_prefix", "end_of_word_suffix"])
def test_a_tokenizer_that_marks_words_has_no_bound(field: str) -> None:
    file = tokenizer_file()
    file["model"][field] = "##"

    assert told(file) is None


def test_a_tokenizer_without_bytes_has_no_bound() -> None:
    made = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()

    assert TokenizerText(made.to_str().encode()).bytes_per_token is None


def test_a_file_of_an_unusual_shape_has_no_bound() -> None:
    file = tokenizer_file()
    file["added_tokens"][0]["lstrip"] = None

    assert told(file) is None


def test_a_file_as_it_is_has_a_bound() -> None:
    assert told(tokenizer_file()) == LONGEST


@given(st.text(max_size=200))
def test_no_text_has_fewer_tokens_than_its_size_says(text: str) -> None:
    bound = TokenizerText(tokenizer_files()["tokenizer.json"]).bytes_per_token

    assert bound is not None
    assert len(tokenizer().encode(text).ids) * bound >= len(text.encode())


@pytest.mark.parametrize(
    "text", ["\u1fbe\u0308\u0301", "\u212a\u0327", "\u1100\u1161\u11a8", "\u03b1\u0313\u0300\u0345"]
)
def test_no_composed_character_is_shorter_than_assumed(text: str) -> None:
    composed = unicodedata.normalize("NFC", text)

    assert len(composed) == 1
    assert len(text.encode()) <= 4 * len(composed.encode())
