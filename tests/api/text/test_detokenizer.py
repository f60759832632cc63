"""Tokens to text, in pieces: nothing lost, nothing early. Engine: none."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from api.text.detokenizer import TextRules, TextStream, TokenizerText
from broker.errors import WireError
from tests.api.fake import EOS, encode, tokenizer, tokenizer_files
from workers.stop_detection import StopDetector


def word_pieces() -> Tokenizer:
    """A tokenizer whose tokens have no bytes of their own: blanks come from neighbours."""
    vocab = {"[UNK]": 0, "hello": 1, "wor": 2, "##ld": 3, "!": 4, "foo": 5}
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    return made


BYTES = TokenizerText(tokenizer_files()["tokenizer.json"])
WORDS = TokenizerText(word_pieces().to_str().encode())


def stream(text: TokenizerText = BYTES, **rules: object) -> TextStream:
    return text.stream(TextRules(**rules))  # type: ignore[arg-type]  # a test names the rules it changes


@given(st.text(max_size=40), st.lists(st.integers(1, 5), max_size=20))
def test_stream_gives_the_whole_text_however_tokens_arrive(text: str, sizes: list[int]) -> None:
    tokens = encode(text)
    under_test = stream()
    shown = ""

    while tokens:
        size = sizes.pop() if sizes else 3
        part, tokens = tokens[:size], tokens[size:]
        shown += under_test.feed(part)
        assert "\ufffd" in text or "\ufffd" not in shown
    assert shown + under_test.finish() == text


@given(st.lists(st.integers(3, 339), max_size=30))
def test_stream_says_what_the_library_decodes_for_any_tokens_but_half_a_character_at_the_end(tokens: list[int]) -> None:
    under_test = stream()

    shown = "".join(under_test.feed([token]) for token in tokens) + under_test.finish()

    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join(BYTES.token_bytes(token) for token in tokens))
    assert shown + ("\ufffd" if decoder.getstate()[0] else "") == tokenizer().decode(tokens)


@pytest.mark.parametrize("cut", range(1, 12))
@pytest.mark.parametrize("stops", [(), (b"STOP",), ("漢字".encode(),)], ids=["none", "letters", "the same beginning"])
@pytest.mark.parametrize("step", [1, 3, 20])
def test_stream_leaves_half_a_character_at_the_end_out(cut: int, stops: tuple[bytes, ...], step: int) -> None:
    tokens = encode("a😀漢b")[:cut]
    under_test = stream(stops=stops)

    shown = "".join(under_test.feed(tokens[at : at + step]) for at in range(0, len(tokens), step)) + under_test.finish()

    whole = b"".join(BYTES.token_bytes(token) for token in tokens)
    assert shown == whole.decode("utf-8", "ignore")


def test_stream_leaves_half_a_character_before_a_stop_string_out() -> None:
    under_test = stream(stops=(b"STOP",))

    shown = under_test.feed([*encode("a😀")[:2], *encode("STOP")]) + under_test.finish()

    assert shown == "a"


@pytest.mark.parametrize("size", [1, 2, 50])
@pytest.mark.parametrize("min_tokens", [0, 4, 5, 9])
def test_stream_ends_where_the_workers_text_does_whatever_min_tokens(min_tokens: int, size: int) -> None:
    tokens = encode("The fox, the fox and the fox jumps over the dog.")
    stops = (b"fox", b"the fox and")
    assert BYTES.table is not None
    there = StopDetector(BYTES.table, stops=stops, ending=(), min_tokens=min_tokens)
    kept = there.feed(tokens)
    here = stream(stops=stops, min_tokens=min_tokens, tracks_tokens=True)

    shown = "".join(here.feed(tokens[start : start + size]) for start in range(0, len(tokens), size)) + here.finish()

    assert kept.is_stopped
    assert here.end == there.end
    assert shown.encode() == tokenizer().decode(tokens).encode()[: there.end]


@pytest.mark.parametrize(("min_tokens", "text"), [(0, ""), (1, "hello world! "), (5, "hello world! foo ")])
def test_stream_without_a_table_passes_over_stop_strings_within_min_tokens(min_tokens: int, text: str) -> None:
    tokens = WORDS.encode("hello world! foo hello", add_special_tokens=False)
    under_test = stream(WORDS, stops=(b"hello", b"foo"), min_tokens=min_tokens)

    assert "".join(under_test.feed([token]) for token in tokens) + under_test.finish() == text
    assert under_test.end == len(text)


def test_stream_without_a_table_says_what_the_library_decodes() -> None:
    tokens = WORDS.encode("hello world! foo", add_special_tokens=False)
    under_test = stream(WORDS)

    assert WORDS.table is None
    assert "".join(under_test.feed([t]) for t in tokens) + under_test.finish() == "hello world! foo"


def test_stream_without_a_table_matches_stop_strings_itself() -> None:
    tokens = WORDS.encode("hello world! foo", add_special_tokens=False)
    under_test = stream(WORDS, stops=(b"ld",))

    shown = under_test.feed(tokens) + under_test.finish()

    assert shown == "hello wor"
    assert under_test.end == 9
    assert not under_test.is_matched_by_worker


def test_stream_hides_the_tokens_that_end_it() -> None:
    visible = encode("fox")[0]
    under_test = stream(hidden=frozenset({visible}), tracks_tokens=True)

    shown = under_test.feed([visible, *encode("!")]) + under_test.finish()

    assert shown == "!"
    assert under_test.shown_tokens == 2


def test_tracked_tokens_wait_for_the_text_they_stand_for() -> None:
    under_test = stream(stops=(b"STOP",), tracks_tokens=True)
    counts = []

    for token in encode("aST"):
        under_test.feed([token])
        counts.append(under_test.shown_tokens)
    under_test.finish()

    assert counts == [1, 1, 1]
    assert under_test.shown_tokens == 3


def test_tracked_tokens_end_with_the_one_a_stop_string_cuts() -> None:
    tokens = encode("The quick")
    under_test = stream(stops=(b"he",), tracks_tokens=True)

    under_test.feed(tokens)
    under_test.finish()

    assert under_test.shown_tokens == 1


def test_tracked_tokens_without_bytes_wait_for_the_next() -> None:
    under_test = stream(tracks_tokens=True)

    under_test.feed([*encode("!"), EOS])
    before = under_test.shown_tokens
    under_test.finish()

    assert (before, under_test.shown_tokens) == (1, 2)


def test_special_tokens_are_named_where_one_token_is_shown() -> None:
    assert BYTES.token_bytes(EOS) == b"<|im_end|>"
    assert BYTES.token_bytes(encode("!")[0]) == b"!"
    assert BYTES.token_bytes(10**6) == b""


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]"])
def test_tokenizer_is_refused_when_its_file_is_none(data: bytes) -> None:
    with pytest.raises(WireError):
        TokenizerText(data)
