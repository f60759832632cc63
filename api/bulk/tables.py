"""Records of tables: CSV as spreadsheets write it, and Parquet; one record at a time, as a mapping by column."""

from __future__ import annotations

import csv
import importlib.util
import io
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, cast

from api.bulk.lines import EncodingError, as_utf8, not_utf8
from api.errors import ApiConfigError

MOST_CELL_CHARACTERS = 64 << 20
"""A quote that is never closed takes all that follows it into one cell; so there is a bound."""
PARQUET_ROWS = 256
SEPARATORS = (",", ";", "\t", "|")
MORE_CELLS = None
"""The key of what a record has beyond its columns."""
_TOLD = re.compile(r'^"?sep=(.)"?$')
"""The line by which a spreadsheet is told the separator."""

Record = dict[str | None, Any]


def csv_records(path: Path, *, encoding: str = "", separator: str | None = None) -> Iterator[Record]:
    """Records under the first line's columns; lines without any cell are passed over.

    Args:
        encoding: what the file is in; by itself what its mark says, else UTF-8.
        separator: what stands between cells; by itself what the line of columns has most of.

    Raises:
        ApiConfigError: the file is in another encoding, or is no table.
    """
    # Strict, because a quote that is never closed would make one silent prompt of all that follows it.
    csv.field_size_limit(MOST_CELL_CHARACTERS)
    try:
        with path.open("rb") as file:
            text = io.TextIOWrapper(cast("Any", as_utf8(file, encoding=encoding)), encoding="utf-8", newline="")
            first = text.readline()
            told = _TOLD.match(first.rstrip("\r\n"))
            found = told[1] if told else _separator(first)
            rows = csv.reader(text if told else chain([first], text), delimiter=separator or found, strict=True)
            columns = [column.strip() for column in next(rows, [])]
            for cells in rows:
                if cells:
                    yield _record(columns, cells)
    except UnicodeDecodeError as error:
        raise ApiConfigError(f"{path} {not_utf8(error)}, or --encoding NAME") from error
    except EncodingError as error:
        raise ApiConfigError(f"{path}: {error}") from error
    except csv.Error as error:
        raise ApiConfigError(f"{path}: line {rows.line_num} is no CSV: {error}") from error


def parquet_records(path: Path) -> Iterator[Record]:
    """Raises: ApiConfigError."""
    for batch in _parquet(path).iter_batches(batch_size=PARQUET_ROWS):
        yield from batch.to_pylist()


def count_parquet(path: Path) -> int:
    """Raises: ApiConfigError."""
    return int(_parquet(path).metadata.num_rows)


def _record(columns: list[str], cells: list[str]) -> Record:
    record: Record = dict(zip(columns, cells + [""] * (len(columns) - len(cells)), strict=False))
    return record if len(cells) <= len(columns) else {**record, MORE_CELLS: cells[len(columns) :]}


def _separator(columns: str) -> str:
    """What a line of columns has most of, outside of quotes."""
    outside = re.sub(r'"[^"]*("|$)', "", columns)
    return max(SEPARATORS, key=outside.count)  # the first of equals: a comma where there is none


def _parquet(path: Path) -> Any:
    if importlib.util.find_spec("pyarrow") is None:
        raise ApiConfigError(f"{path}: reading Parquet needs pyarrow; allowed: pip install 'mtplx[parquet]'")
    from pyarrow import ArrowInvalid, parquet

    try:
        return parquet.ParquetFile(path)
    except ArrowInvalid as error:
        raise ApiConfigError(f"{path}: not a Parquet file: {error}") from error
