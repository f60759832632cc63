"""Stop strings on bytes against `bytes.find`. Engine: none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.text.stop_strings import StopMatcher

ALPHABETS = (b"ab", b"abc", "é€😀a".encode())


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    alphabet = draw(st.sampled_from(ALPHABETS))
    return bytes(draw(st.lists(st.sampled_from(list(alphabet)), max_size=40)))


@st.composite
def stop_lists(draw: st.DrawFn) -> list[bytes]:
    alphabet = draw(st.sampled_from(ALPHABETS))
    stop = st.lists(st.sampled_from(list(alphabet)), min_size=1, max_size=6).map(bytes)
    return draw(st.lists(stop, max_size=4))


def cut(text: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[low:high] for low, high in zip(bounds, bounds[1:], strict=False)]


def naive_end(text: bytes, stops: list[bytes]) -> int | None:
    """Grow the text byte by byte; at the first byte that completes a stop string cut the longest one off."""
    for size in range(len(text) + 1):
        starts = [text[:size].find(stop) for stop in stops if stop in text[:size]]
        if starts:
            return min(starts)
    return None


def run(stops: list[bytes], pieces: list[bytes]) -> tuple[list[bytes], int | None]:
    matcher = StopMatcher(stops)
    shown = [matcher.feed(piece).safe for piece in pieces]
    return [*shown, matcher.flush()], matcher.end


@given(texts(), stop_lists(), st.lists(st.integers(0, 100), max_size=8))
def test_matcher_ends_where_find_says_when_the_text_comes_in_pieces(
    text: bytes, stops: list[bytes], places: list[int]
) -> None:
    shown, end = run(stops, cut(text, places))

    expected = naive_end(text, stops)
    assert end == expected
    assert b"".join(shown) == (text if expected is None else text[:expected])


@given(texts(), texts(), stop_lists(), st.lists(st.integers(0, 100), max_size=8))
def test_matcher_ends_only_with_a_stop_string_that_is_complete_behind_the_bound(
    early: bytes, rest: bytes, stops: list[bytes], places: list[int]
) -> None:
    matcher = StopMatcher(stops)

    shown = [matcher.feed(piece, may_end=False).safe for piece in cut(early, places)]
    shown += [matcher.feed(piece).safe for piece in cut(rest, places)]

    text, expected = early + rest, None
    for size in range(len(early) + 1, len(text) + 1):
        ends = [size - len(stop) for stop in stops if text[:size].endswith(stop)]
        if ends:
            expected = min(ends)
            break
    assert matcher.end == expected
    assert b"".join([*shown, matcher.flush()]) == (text if expected is None else text[:expected])


@given(texts(), stop_lists(), st.lists(st.integers(0, 100), max_size=8))
def test_matcher_shows_nothing_a_stop_string_could_still_take_back(
    text: bytes, stops: list[bytes], places: list[int]
) -> None:
    matcher = StopMatcher(stops)
    seen = b""
    shown = b""

    for piece in cut(text, places):
        seen += piece
        shown += matcher.feed(piece).safe
        if matcher.end is None:
            held = seen[len(shown) :]
            assert not held or any(stop.startswith(held) and stop != held for stop in stops)
            ends = [shown[start:] for start in range(len(shown))]
            assert not any(stop.startswith(end + held) for stop in stops for end in ends)


@given(texts(), stop_lists())
def test_matcher_fed_at_once_ends_where_one_fed_byte_by_byte_does(text: bytes, stops: list[bytes]) -> None:
    _, end = run(stops, [bytes([byte]) for byte in text])

    assert StopMatcher(stops).feed(text).end == end


def test_matcher_ends_the_text_inside_one_multi_token_step() -> None:
    fed = StopMatcher([b"own fox"]).feed(b"The quick brown fox jumps")

    assert fed == (b"The quick br", 12)


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        pytest.param([b"cd"], [b"ab", b"c", b"de"], b"ab", id="across tokens"),
        pytest.param([b"abcd", b"bc"], [b"xa", b"bcd"], b"xa", id="inner one is complete first"),
        pytest.param([b"bc", b"abc"], [b"xabc"], b"x", id="longest of those complete together"),
        pytest.param([b"aab"], [b"aaa", b"ab"], b"aa", id="overlap with itself"),
        pytest.param(["é".encode()], [b"x\xc3", b"\xa9y"], b"x", id="inside a character"),
        pytest.param([b"", b"z"], [b"ab"], b"ab", id="an empty stop string matches nothing"),
    ],
)
def test_matcher_shows_the_text_before_the_stop(stops: list[bytes], pieces: list[bytes], expected: bytes) -> None:
    shown, _ = run(stops, pieces)

    assert b"".join(shown) == expected


def test_matcher_holds_half_a_stop_string_back_until_it_is_none() -> None:
    matcher = StopMatcher([b"STOP"])

    assert matcher.feed(b"go ST").safe == b"go "
    assert matcher.feed(b"AY").safe == b"STAY"


def test_matcher_gives_back_what_it_held_when_the_text_is_over() -> None:
    matcher = StopMatcher([b"STOP"])
    matcher.feed(b"go STO")

    assert matcher.flush() == b"STO"
    assert matcher.flush() == b""


def test_matcher_releases_nothing_after_a_match() -> None:
    matcher = StopMatcher([b"."])
    matcher.feed(b"a.b")

    assert matcher.feed(b"more") == (b"", 1)
    assert matcher.flush() == b""
