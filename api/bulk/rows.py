"""Where the prompts of a bulk run come from: a file of any known format, one row at a time, each made into a call."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from api.bulk.lines import MOST_LINE_BYTES, EncodingError, RawLine, read_lines, text_of
from api.bulk.tables import MORE_CELLS, Record, count_parquet, csv_records, parquet_records
from api.calls.call import Endpoint
from api.errors import ApiConfigError

Format = Literal["jsonl", "csv", "tsv", "txt", "parquet"]
SUFFIXES: Mapping[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "txt",
    ".parquet": "parquet",
}
_TOO_LONG = f"This line is longer than {MOST_LINE_BYTES >> 20} MiB."
_PLACE = re.compile(r"""\{([^{}\n"':]+)\}""")
"""A column in a template; braces of JSON hold a quote or a colon."""


class BulkRow(NamedTuple):
    """One prompt as a call, or what is wrong with it."""

    number: int
    """From 1: the line of a JSON lines file, the record of a table."""
    name: str
    """The row's own id, or its number."""
    endpoint: Endpoint = "/v1/chat/completions"
    body: bytes = b""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """How a file is to be read, where it does not tell by itself."""

    format: Format | None = None
    encoding: str = ""
    separator: str | None = None
    """Between the cells of a table."""


@dataclass(frozen=True, slots=True)
class RowRecipe:
    """How a row becomes a call."""

    model: str
    column: str | None = None
    """Column of a table that holds the prompt."""
    template: str | None = None
    """Text of the prompt with {column} where a column's value goes."""
    is_raw: bool = False
    """The prompt is a text to go on with, not a message of a conversation."""
    system: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every call; a row's own go before them."""
    source: Source = Source()


def format_of(path: Path, said: Format | None = None) -> Format:
    """How a file is to be read: as was said, else as its suffix says. Raises: ApiConfigError."""
    found = said or SUFFIXES.get(path.suffix.lower())
    if found is None:
        known = ", ".join(SUFFIXES)
        raise ApiConfigError(
            f"prompts = {str(path)!r}: its name does not say what it holds; "
            f"allowed: a name in {known}, or --format {'|'.join(get_args(Format))}"
        )
    return found


def read_rows(path: Path, recipe: RowRecipe) -> Iterator[BulkRow]:
    """Every row that is not blank.

    Raises:
        ApiConfigError: this file cannot be read here.
        OSError: it cannot be read.
    """
    match format_of(path, recipe.source.format):
        case "jsonl":
            return (_json_row(line, recipe) for line in _lines(path, recipe.source))
        case "txt":
            return (_text_row(line, recipe) for line in _texts(path, recipe.source))
    records = enumerate(_records(path, recipe.source), 1)
    return (_table_row(number, record, recipe) for number, record in records)


def is_table(path: Path, source: Source) -> bool:
    """Whether all rows have the same columns."""
    return format_of(path, source.format) in ("csv", "tsv", "parquet")


def count_rows(path: Path, source: Source) -> int:
    """How many rows there are, exactly. Raises: as `read_rows`."""
    match format_of(path, source.format):
        case "jsonl":
            return sum(1 for _ in _lines(path, source))
        case "txt":
            return sum(1 for _ in _texts(path, source))
        case "parquet":
            return count_parquet(path)
    return sum(1 for _ in _records(path, source))


def _lines(path: Path, source: Source) -> Iterator[RawLine]:
    try:
        with path.open("rb") as file:
            yield from read_lines(file, encoding=source.encoding)
    except EncodingError as error:
        raise ApiConfigError(f"{path}: {error}") from error


def _texts(path: Path, source: Source) -> Iterator[RawLine]:
    """Lines that are UTF-8 for certain; a file whose lines are prompts is refused as a whole."""
    for line in _lines(path, source):
        try:
            text_of(line.data if not line.is_cut else b"", line=line.number)
        except EncodingError as error:
            raise ApiConfigError(f"{path}: {error}, or --encoding NAME") from error
        yield line


def _records(path: Path, source: Source) -> Iterator[Record]:
    match format_of(path, source.format):
        case "parquet":
            return parquet_records(path)
        case "tsv":
            return csv_records(path, encoding=source.encoding, separator=source.separator or "\t")
    return csv_records(path, encoding=source.encoding, separator=source.separator)


def _text_row(line: RawLine, recipe: RowRecipe) -> BulkRow:
    name = str(line.number)
    if line.is_cut:
        return BulkRow(line.number, name, problem=_TOO_LONG)
    return _table_row(line.number, {"prompt": text_of(line.data, line=line.number)}, recipe)


def _json_row(line: RawLine, recipe: RowRecipe) -> BulkRow:
    number = line.number
    if line.is_cut:
        return BulkRow(number, str(number), problem=_TOO_LONG)
    try:
        record = msgspec.json.decode(text_of(line.data, line=number), type=str | dict[str, Any])
    except EncodingError as error:
        return BulkRow(number, str(number), problem=f"The {error}.")
    except (msgspec.MsgspecError, RecursionError) as error:
        return BulkRow(number, str(number), problem=f"This line is neither a JSON object nor a text: {error}.")
    if isinstance(record, str):
        return _prompt_row(number, str(number), record, {}, recipe)
    name = str(record.pop("custom_id", record.pop("id", number)))
    if isinstance(body := record.get("body"), dict):  # a line of a batch's input file
        is_chat = record.get("url", "/v1/chat/completions") == "/v1/chat/completions"
        return _row(number, name, "/v1/chat/completions" if is_chat else "/v1/completions", body, recipe)
    if "messages" in record:
        return _row(number, name, "/v1/chat/completions", record, recipe)
    if recipe.template is not None or recipe.column is not None:
        return _table_row(number, record, recipe, name=name)
    if "prompt" not in record:
        return BulkRow(number, name, problem="This line has neither messages nor a prompt.")
    return _prompt_row(number, name, record.pop("prompt"), record, recipe)


def _table_row(number: int, record: Mapping[Any, Any], recipe: RowRecipe, *, name: str | None = None) -> BulkRow:
    name = name or _name(record, number)
    if MORE_CELLS in record:
        return BulkRow(number, name, problem="This record has more cells than there are columns.")
    column, template = recipe.column or "prompt", recipe.template
    wanted = [column] if template is None else _PLACE.findall(template)
    missing = [each for each in wanted if each not in record]
    if missing:
        return BulkRow(number, name, problem=f"No column {missing[0]!r}; there are: {', '.join(map(str, record))}.")
    prompt = (
        _PLACE.sub(lambda place: _cell(record, place[1]), template) if template is not None else _cell(record, column)
    )
    return _prompt_row(number, name, prompt, {}, recipe)


def _cell(record: Mapping[Any, Any], column: str) -> str:
    return "" if record[column] is None else str(record[column])


def _name(record: Mapping[Any, Any], number: int) -> str:
    """The record's own id, if it has one."""
    own = (record.get(column) for column in ("custom_id", "id"))
    return str(next((each for each in own if each not in (None, "")), number))


def _prompt_row(number: int, name: str, prompt: Any, fields: Mapping[str, Any], recipe: RowRecipe) -> BulkRow:
    if recipe.is_raw or not isinstance(prompt, str):
        return _row(number, name, "/v1/completions", {"prompt": prompt, **fields}, recipe)
    messages = [{"role": "user", "content": prompt}]
    if recipe.system is not None:
        messages.insert(0, {"role": "system", "content": recipe.system})
    return _row(number, name, "/v1/chat/completions", {"messages": messages, **fields}, recipe)


def _row(number: int, name: str, endpoint: Endpoint, body: Mapping[str, Any], recipe: RowRecipe) -> BulkRow:
    return BulkRow(number, name, endpoint, msgspec.json.encode({"model": recipe.model, **recipe.fields, **body}))
