"""Files of prompts as people have them: encodings, line ends, spreadsheets, names. Runs on no engine."""

from __future__ import annotations

import codecs
import io
import json
from pathlib import Path
from typing import Any, cast

import pytest

from api.bulk.lines import EncodingError, RawLine, read_lines
from api.bulk.rows import BulkRow, RowRecipe, Source, count_rows, read_rows
from api.bulk.run import Bulk
from api.errors import ApiConfigError
from console.commands.run import until_broken_off

SAID = ("one", "zwei \u2028 drei", "naïve")
JSON_LINES = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in SAID)
ENCODINGS = {
    "utf-8": JSON_LINES.encode(),
    "utf-8 with a mark": codecs.BOM_UTF8 + JSON_LINES.encode(),
    "utf-16 little": codecs.BOM_UTF16_LE + JSON_LINES.encode("utf-16-le"),
    "utf-16 big": codecs.BOM_UTF16_BE + JSON_LINES.encode("utf-16-be"),
    "utf-16 without a mark": JSON_LINES.encode("utf-16-le"),
    "utf-32": codecs.BOM_UTF32_LE + JSON_LINES.encode("utf-32-le"),
    "line ends of Windows": JSON_LINES.replace("\n", "\r\n").encode(),
    "blank lines": JSON_LINES.replace("\n", "\n \n\n").encode(),
    "no last line end": JSON_LINES.rstrip("\n").encode(),
}


def rows_of(path: Path, recipe: RowRecipe | None = None) -> list[BulkRow]:
    recipe = recipe or RowRecipe("m", is_raw=True)
    rows = list(read_rows(path, recipe))
    assert count_rows(path, recipe.source) == len(rows)
    return rows


def prompts_of(path: Path, recipe: RowRecipe | None = None) -> list[str]:
    rows = rows_of(path, recipe)
    assert [row.problem for row in rows] == [""] * len(rows)
    return [json.loads(row.body)["prompt"] for row in rows]


def written(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize("data", ENCODINGS.values(), ids=ENCODINGS.keys())
def test_json_lines_are_read_in_every_encoding_that_says_what_it_is(tmp_path: Path, data: bytes) -> None:
    assert prompts_of(written(tmp_path / "p.jsonl", data)) == list(SAID)


@pytest.mark.parametrize("suffix", [".csv", ".txt"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_tables_and_texts_are_read_in_them_too(tmp_path: Path, suffix: str, encoding: str) -> None:
    text = "\n".join(["prompt", *SAID])
    path = written(tmp_path / f"p{suffix}", text.encode(encoding))

    assert prompts_of(path) == (list(SAID) if suffix == ".csv" else ["prompt", *SAID])


def test_lines_of_utf_16_are_cut_at_the_bound_as_others_are() -> None:
    file = io.BytesIO(codecs.BOM_UTF16_LE + ("x" * 100_000 + "\nnext\n").encode("utf-16-le"))

    first, second = read_lines(file, most_line_bytes=10)

    assert (first.number, len(first.data), first.is_cut) == (1, 11, True)
    assert second == RawLine(2, b"next")


def test_file_that_breaks_off_within_a_character_is_said_to() -> None:
    with pytest.raises(EncodingError, match="utf-16-le"):
        list(read_lines(io.BytesIO(codecs.BOM_UTF16_LE + b"a\0b")))


def test_text_file_is_a_prompt_a_line_and_fills_a_template(tmp_path: Path) -> None:
    path = written(tmp_path / "p.txt", 'one\n\n  two \r\n"three"')

    assert prompts_of(path) == ["one", "  two ", '"three"']
    assert [row.number for row in rows_of(path)] == [1, 3, 4]
    assert prompts_of(path, RowRecipe("m", is_raw=True, template="Say {prompt}."))[0] == "Say one."


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"], ids=["comma", "semicolon", "tab", "bar"])
def test_separator_of_a_table_is_found_in_its_first_line(tmp_path: Path, separator: str) -> None:
    rows = [["id", '"a, b; c"', "prompt"], ["x", "", '"one\ntwo, three; four"'], ["y", "1", "five"]]
    path = written(tmp_path / "p.csv", "\r\n".join(separator.join(cells) for cells in rows))

    assert prompts_of(path) == ["one\ntwo, three; four", "five"]
    assert [row.name for row in rows_of(path)] == ["x", "y"]


def test_separator_may_be_said_by_the_file_or_by_its_reader(tmp_path: Path) -> None:
    told = written(tmp_path / "told.csv", "sep=;\nprompt,x\n")
    said = written(tmp_path / "said.csv", "a,b;prompt,c\n1;2\n")

    assert rows_of(told) == []
    assert prompts_of(said, RowRecipe("m", "prompt,c", is_raw=True, source=Source(separator=";"))) == ["2"]


@pytest.mark.parametrize("name", ["p.csv", "p.txt"])
def test_file_of_a_spreadsheet_on_windows_is_refused_with_what_to_do_and_read_when_told(
    tmp_path: Path, name: str
) -> None:
    path = written(tmp_path / name, "prompt\nnaïve café\n".encode("cp1252"))

    with pytest.raises(ApiConfigError, match=r"cp1252.*iconv -f cp1252 -t UTF-8, or --encoding"):
        count_rows(path, Source())

    assert prompts_of(path, RowRecipe("m", is_raw=True, source=Source(encoding="cp1252")))[-1] == "naïve café"


def test_line_of_json_in_latin_1_says_so(tmp_path: Path) -> None:
    [row] = rows_of(written(tmp_path / "p.jsonl", '"naïve"\n'.encode("latin-1")))

    assert "line 1 is not UTF-8 (byte 0xef) but perhaps Latin-1" in row.problem


@pytest.mark.parametrize("column", ["id", "custom_id"])
def test_rows_of_a_table_have_their_own_ids(tmp_path: Path, column: str) -> None:
    path = written(tmp_path / "p.csv", f"{column},prompt\nfirst,one\n,two\n0,three\n")

    assert [row.name for row in rows_of(path)] == ["first", "2", "0"]


def test_cell_may_be_as_long_as_a_prompt_may(tmp_path: Path) -> None:
    path = written(tmp_path / "p.csv", f'prompt\n"{"x" * 200_000}"\n')

    assert [len(prompt) for prompt in prompts_of(path)] == [200_000]


def test_columns_may_have_any_name(tmp_path: Path) -> None:
    path = written(tmp_path / "p.csv", "Vor-Name;Frage 1\nAda;wer?\n")

    assert prompts_of(path, RowRecipe("m", "Frage 1", is_raw=True)) == ["wer?"]
    template = '{Vor-Name}: {Frage 1} {"a": 1}'
    assert prompts_of(path, RowRecipe("m", template=template, is_raw=True)) == ['Ada: wer? {"a": 1}']


def test_record_with_more_cells_than_columns_is_an_error_of_its_own(tmp_path: Path) -> None:
    rows = rows_of(written(tmp_path / "p.csv", "prompt\nHello, world\nHi\n"))

    assert ["more cells" in row.problem for row in rows] == [True, False]


def test_table_that_is_none_is_refused_by_its_line(tmp_path: Path) -> None:
    with pytest.raises(ApiConfigError, match="line 4 is no CSV: unexpected end"):
        count_rows(written(tmp_path / "p.csv", 'prompt\none\n"two\nthree\n'), Source())


def test_parquet_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ApiConfigError, match="not a Parquet file"):
        count_rows(written(tmp_path / "p.parquet", "prompt\n"), Source())


@pytest.mark.parametrize("name", ["p.json", "p.xlsx", "prompts", "p.gz"])
def test_file_whose_name_says_nothing_is_asked_about_and_read_when_told(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, '"one"\n')

    with pytest.raises(ApiConfigError, match=r"\.jsonl, .*\.txt, .*--format jsonl\|csv"):
        count_rows(path, Source())

    assert prompts_of(path, RowRecipe("m", is_raw=True, source=Source(format="jsonl"))) == ["one"]


async def test_run_whose_output_cannot_be_written_any_more_ends_with_one_sentence() -> None:
    class Full:
        was_abandoned = False

        async def run(self, rows: Any) -> None:
            raise ExceptionGroup("rows", [OSError(28, "No space left on device")])

        async def abandon(self) -> None:
            self.was_abandoned = True

    full = Full()

    with pytest.raises(OSError, match="the output cannot be written: .*No space left"):
        await until_broken_off(cast("Bulk", full), iter(()))

    assert full.was_abandoned
