"""Where the prompts of a bulk run come from: JSON lines, CSV or Parquet, one row at a time, each made into a call."""

from __future__ import annotations

import csv
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from api.errors import ApiConfigError
from api.text_calls import Endpoint

PARQUET_ROWS = 256
_PLACE = re.compile(r"\{(\w+)\}")


class Row(NamedTuple):
    """One prompt as a call, or what is wrong with it."""

    number: int
    """From 1: the line of a JSON lines file, the record of a table."""
    name: str
    """The row's own id, or its number."""
    endpoint: Endpoint = "/v1/chat/completions"
    body: bytes = b""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Recipe:
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


def read_rows(path: Path, recipe: Recipe) -> Iterator[Row]:
    """Every row that is not blank.

    Raises:
        ApiConfigError: this kind of file cannot be read here.
        OSError: it cannot be read.
    """
    match path.suffix.lower():
        case ".csv" | ".tsv":
            records = _csv_records(path)
        case ".parquet":
            records = _parquet_records(path)
        case _:
            yield from _json_rows(path, recipe)
            return
    for number, record in enumerate(records, 1):
        yield _table_row(number, record, recipe)


def is_table(path: Path) -> bool:
    """Whether all rows have the same columns."""
    return path.suffix.lower() in (".csv", ".tsv", ".parquet")


def count_rows(path: Path) -> int:
    """How many rows there are, exactly. Raises: as `read_rows`."""
    match path.suffix.lower():
        case ".csv" | ".tsv":
            return sum(1 for _ in _csv_records(path))
        case ".parquet":
            return int(_parquet(path).metadata.num_rows)
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def _json_rows(path: Path, recipe: Recipe) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _json_row(number, line, recipe)


def _json_row(number: int, line: bytes, recipe: Recipe) -> Row:
    try:
        record = msgspec.json.decode(line, type=str | dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return Row(number, str(number), problem=f"This line is neither a JSON object nor a text: {error}.")
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
        return Row(number, name, problem="This line has neither messages nor a prompt.")
    return _prompt_row(number, name, record.pop("prompt"), record, recipe)


def _table_row(number: int, record: Mapping[str, Any], recipe: Recipe, *, name: str | None = None) -> Row:
    name = str(number) if name is None else name
    template = recipe.template or f"{{{recipe.column or 'prompt'}}}"
    missing = [column for column in _PLACE.findall(template) if column not in record]
    if missing:
        return Row(number, name, problem=f"No column {missing[0]!r}; there are: {', '.join(map(str, record))}.")
    prompt = _PLACE.sub(lambda place: "" if record[place[1]] is None else str(record[place[1]]), template)
    return _prompt_row(number, name, prompt, {}, recipe)


def _prompt_row(number: int, name: str, prompt: Any, fields: Mapping[str, Any], recipe: Recipe) -> Row:
    if recipe.is_raw or not isinstance(prompt, str):
        return _row(number, name, "/v1/completions", {"prompt": prompt, **fields}, recipe)
    messages = [{"role": "user", "content": prompt}]
    if recipe.system is not None:
        messages.insert(0, {"role": "system", "content": recipe.system})
    return _row(number, name, "/v1/chat/completions", {"messages": messages, **fields}, recipe)


def _row(number: int, name: str, endpoint: Endpoint, body: Mapping[str, Any], recipe: Recipe) -> Row:
    return Row(number, name, endpoint, msgspec.json.encode({"model": recipe.model, **recipe.fields, **body}))


def _csv_records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        yield from csv.DictReader(file, dialect="excel-tab" if path.suffix.lower() == ".tsv" else "excel")


def _parquet_records(path: Path) -> Iterator[dict[str, Any]]:
    for batch in _parquet(path).iter_batches(batch_size=PARQUET_ROWS):
        yield from batch.to_pylist()


def _parquet(path: Path) -> Any:
    if importlib.util.find_spec("pyarrow") is None:
        raise ApiConfigError(f"{path}: reading Parquet needs pyarrow; allowed: pip install 'mtplx[parquet]'")
    from pyarrow import parquet

    return parquet.ParquetFile(path)
