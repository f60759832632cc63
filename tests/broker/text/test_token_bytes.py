"""Byte tables against the tokenizers library's own decoding. Engine: none."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from broker.errors import WireError
from broker.text.token_bytes import ByteTable, byte_level_alphabet, byte_table, text_of

CORPUS = ["The quick brown fox", "jumps über den Zaun", "漢字 and 😀 emoji", "1234 lines\n\tof text"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, merges, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    return tokenizer


BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()


def id_of(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None
    return found


def table_of(tokenizer: Tokenizer) -> ByteTable:
    table = byte_table(tokenizer.to_str().encode())
    assert table is not None
    return table


BYTE_LEVEL_TABLE = table_of(BYTE_LEVEL)
BYTE_FALLBACK_TABLE = table_of(BYTE_FALLBACK)


@settings(deadline=None)
@given(st.text())
def test_table_gives_the_text_back_when_the_tokenizer_is_byte_level(text: str) -> None:
    tokens = BYTE_LEVEL.encode(text).ids

    assert text_of(BYTE_LEVEL_TABLE, tokens).decode() == BYTE_LEVEL.decode(tokens)


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")))
def test_table_gives_the_text_back_when_the_tokenizer_falls_back_to_bytes(text: str) -> None:
    tokens = BYTE_FALLBACK.encode(text).ids

    assert text_of(BYTE_FALLBACK_TABLE, tokens).decode().removeprefix(" ") == BYTE_FALLBACK.decode(tokens)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
def test_table_has_an_entry_for_every_token(tokenizer: Tokenizer) -> None:
    assert len(table_of(tokenizer)) == tokenizer.get_vocab_size()


def test_table_has_no_bytes_for_special_tokens() -> None:
    assert BYTE_LEVEL_TABLE[id_of(BYTE_LEVEL, "<|end|>")] == b""
    assert BYTE_FALLBACK_TABLE[id_of(BYTE_FALLBACK, "<s>")] == b""


def test_table_keeps_added_tokens_that_are_not_special() -> None:
    assert BYTE_LEVEL_TABLE[id_of(BYTE_LEVEL, "<think>")] == b"<think>"


def test_text_of_gives_no_bytes_to_ids_outside_the_table() -> None:
    assert text_of((b"a",), [0, 7, 0]) == b"aa"


def test_table_reads_a_unigram_vocabulary() -> None:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁hi", -1.0)], 0, byte_fallback=False))
    tokenizer.decoder = decoders.Metaspace()

    assert table_of(tokenizer) == (b"<unk>", b" hi")


@pytest.mark.parametrize(
    "decoder",
    [decoders.WordPiece(), decoders.BPEDecoder(), decoders.CTC(), decoders.Sequence([decoders.WordPiece()]), None],
    ids=["wordpiece", "bpe suffix", "ctc", "sequence", "none"],
)
def test_table_is_none_when_tokens_have_no_bytes_of_their_own(decoder: decoders.Decoder | None) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    if decoder is not None:
        tokenizer.decoder = decoder

    assert byte_table(tokenizer.to_str().encode()) is None


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", json.dumps({"model": {"vocab": 3}}).encode()])
def test_table_is_refused_when_the_bytes_are_no_tokenizer(data: bytes) -> None:
    with pytest.raises(WireError, match=r"not a tokenizer\.json"):
        byte_table(data)


def test_alphabet_names_every_byte_once() -> None:
    assert sorted(byte_level_alphabet().values()) == list(range(256))
