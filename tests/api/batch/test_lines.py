"""Lines of batch files: read within bounds, checked, and what is wrong with them. Runs on no engine."""

from __future__ import annotations

import codecs
import io

import pytest

from api.batch.lines import ERRORS_KEPT, LineError, LineRules, check_file, parse_line
from api.bulk.lines import RawLine, read_lines
from tests.offline.batch_files import jsonl, line

RULES = LineRules("/v1/completions", most_lines=1000, most_line_bytes=4096)


def test_blank_lines_are_passed_over_and_counted() -> None:
    lines = list(read_lines(io.BytesIO(b"\n{}\n \r\n{}"), most_line_bytes=10))

    assert [(each.number, each.data) for each in lines] == [(2, b"{}"), (4, b"{}")]


def test_line_that_is_too_long_is_cut_and_the_next_is_whole() -> None:
    lines = list(read_lines(io.BytesIO(b"x" * 25 + b"\nnext\n"), most_line_bytes=10))

    assert [(each.number, len(each.data), each.is_cut) for each in lines] == [(1, 11, True), (2, 4, False)]


def test_line_of_just_the_bound_is_whole() -> None:
    [only] = read_lines(io.BytesIO(b"x" * 10 + b"\n"), most_line_bytes=10)

    assert not only.is_cut


def test_last_line_needs_no_end() -> None:
    [only] = read_lines(io.BytesIO(b"x" * 30), most_line_bytes=10)

    assert only.is_cut


def test_good_line_keeps_its_body_as_it_was_written() -> None:
    data = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"model": "m",  "x": 1.50}}'

    parsed = parse_line(RawLine(7, data), RULES)

    assert (parsed.number, parsed.custom_id, parsed.body) == (7, "a", b'{"model": "m",  "x": 1.50}')


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (RawLine(1, b"x", is_cut=True), "line_too_long"),
        (RawLine(1, b"[]"), "invalid_request"),
        (RawLine(1, b'{"custom_id": "\xff"}'), "invalid_json_line"),
        (RawLine(1, b'{"custom_id": "a", "body": ' + b"[" * 100_000), "invalid_json_line"),
        (RawLine(1, jsonl([line("")]).strip()), "missing_custom_id"),
    ],
    ids=["long", "array", "not-utf8", "deep", "empty-id"],
)
def test_line_that_is_no_call_says_why(raw: RawLine, code: str) -> None:
    with pytest.raises(LineError) as caught:
        parse_line(raw, RULES)

    assert caught.value.shown.code == code
    assert caught.value.shown.line == 1


def test_file_with_more_lines_than_allowed_is_wrong_at_the_first_too_many() -> None:
    rules = LineRules("/v1/completions", most_lines=2, most_line_bytes=4096)

    verdict = check_file(io.BytesIO(jsonl([line(str(i)) for i in range(5)])), rules)

    assert [(each.code, each.line) for each in verdict.errors] == [("too_many_lines", 3)]


def test_file_that_is_wrong_throughout_is_described_by_its_first_lines() -> None:
    verdict = check_file(io.BytesIO(b"x\n" * 500), RULES)

    assert len(verdict.errors) == ERRORS_KEPT
    assert verdict.total == 500


def test_models_are_named_with_the_line_that_asks_first() -> None:
    data = jsonl([line("a"), line("b", model="other"), line("c")])

    assert check_file(io.BytesIO(data), RULES).models == {"scripted": 1, "other": 2}


def test_check_stops_when_told() -> None:
    verdict = check_file(io.BytesIO(jsonl([line(str(i)) for i in range(5)])), RULES, goes_on=lambda: False)

    assert verdict.total == 0


@pytest.mark.parametrize(
    "data",
    [
        codecs.BOM_UTF8 + jsonl([line("a"), line("b")]),
        codecs.BOM_UTF16_LE + jsonl([line("a"), line("b")]).decode().encode("utf-16-le"),
        jsonl([line("a"), line("b")]).replace(b"\n", b"\r\n"),
        jsonl([line("a"), line("b", prompt="\u2028")]).replace(b"\\u2028", "\u2028".encode()),
    ],
    ids=["mark", "utf-16", "line ends of Windows", "separator within a text"],
)
def test_file_is_read_as_people_have_it(data: bytes) -> None:
    verdict = check_file(io.BytesIO(data), RULES)

    assert (verdict.total, verdict.errors) == (2, [])


def test_line_in_another_encoding_is_wrong_by_its_name() -> None:
    [error] = check_file(io.BytesIO(jsonl([line("a")]).replace(b'"a"', b'"\xef"')), RULES).errors

    assert (error.line, error.code) == (1, "invalid_json_line")
    assert "Windows-1252" in error.message


def test_file_that_breaks_off_within_a_character_is_wrong_as_a_whole() -> None:
    [error] = check_file(io.BytesIO(codecs.BOM_UTF16_LE + b"x"), RULES).errors

    assert (error.line, error.code) == (None, "invalid_encoding")
