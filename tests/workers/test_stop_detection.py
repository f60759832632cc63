"""Where a completion's text ends. Engine: none; Redis: none."""

from __future__ import annotations

import pytest

from broker.text.token_bytes import ByteTable
from workers.stop_detection import UNKNOWN_END, KeptTokens, StopDetector

TABLE: ByteTable = (b"", b"the ", b"quick ", b"br", b"own ", b"fox", b" jumps", b"\xc3", b"\xa9")
END, STOP_TOKEN = 0, 6


def follow(*stops: bytes, table: ByteTable | None = TABLE, min_tokens: int = 0) -> StopDetector:
    return StopDetector(table, stops=stops, ending={END, STOP_TOKEN}, min_tokens=min_tokens)


def test_text_ends_at_the_last_token_when_nothing_stops_it() -> None:
    text = follow()

    assert text.feed((1, 2, 3)) == KeptTokens(3, is_stopped=False)
    assert text.end == len(b"the quick br")


@pytest.mark.parametrize("token", [END, STOP_TOKEN], ids=["end-of-sequence", "stop-token"])
def test_text_ends_before_a_token_that_ends_the_row(token: int) -> None:
    text = follow()

    assert text.feed((1, 2, token)) == KeptTokens(3, is_stopped=False)
    assert text.end == len(b"the quick ")


def test_text_ends_where_a_stop_string_begins_inside_one_step() -> None:
    text = follow(b"own fox")

    assert text.feed((1, 2, 3, 4, 5, 6)) == KeptTokens(5, is_stopped=True)
    assert text.end == len(b"the quick br")


def test_text_ends_where_a_stop_string_begins_over_several_steps() -> None:
    text = follow(b"own fox")
    assert not text.feed((1, 2, 3)).is_stopped
    assert not text.feed((4,)).is_stopped

    assert text.feed((5, 1)) == KeptTokens(1, is_stopped=True)
    assert text.end == len(b"the quick br")


def test_text_ends_inside_a_token_that_holds_the_stop_string() -> None:
    text = follow(b"ui")

    assert text.feed((1, 2, 3)) == KeptTokens(2, is_stopped=True)
    assert text.end == len(b"the q")


def test_text_ends_inside_a_character() -> None:
    text = follow(b"\xa9")

    assert text.feed((1, 7, 8)) == KeptTokens(3, is_stopped=True)
    assert text.end == len(b"the \xc3")


def test_stop_string_does_not_match_over_a_token_that_ends_the_row() -> None:
    text = follow(b"fox jumps")

    assert text.feed((5, STOP_TOKEN)) == KeptTokens(2, is_stopped=False)


@pytest.mark.parametrize("step", [1, 2, 6])
def test_stop_string_within_min_tokens_counts_for_nothing(step: int) -> None:
    text = follow(b"quick", b"fox", min_tokens=4)
    tokens = (1, 2, 3, 2, 2, 5)

    kept = [text.feed(tokens[start : start + step]) for start in range(0, 6, step)]

    assert next(place for place, each in enumerate(kept) if each.is_stopped) == 4 // step
    assert text.end == len(b"the quick brquick ")


def test_stop_string_across_min_tokens_ends_the_text_where_it_begins() -> None:
    text = follow(b"own fox", min_tokens=4)

    assert text.feed((1, 2, 3, 4, 5, 6)) == KeptTokens(5, is_stopped=True)
    assert text.end == len(b"the quick br")


def test_token_outside_the_table_has_no_bytes() -> None:
    text = follow()

    assert text.feed((1, 999)) == KeptTokens(2, is_stopped=False)
    assert text.end == len(b"the ")


def test_text_has_no_known_end_without_a_table() -> None:
    text = follow(b"own fox", table=None)

    assert text.feed((3, 4, 5)) == KeptTokens(3, is_stopped=False)
    assert text.end == UNKNOWN_END
