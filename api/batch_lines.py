"""The lines of a batch's input file: read within bounds, checked, and what is wrong with them. Pure but for reading."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, NamedTuple

import msgspec

from api.batch_schemas import BatchError

ERRORS_KEPT = 100
"""A file that is wrong throughout is described by its first lines."""


class Line(NamedTuple):
    """One call of a batch."""

    number: int
    """From 1, blank lines counted."""
    custom_id: str
    body: bytes


class RawLine(NamedTuple):
    number: int
    data: bytes
    is_cut: bool = False
    """It was longer than allowed; `data` is its beginning."""


class LineError(Exception):
    """A line is not a call; says why in OpenAI's words."""

    def __init__(self, code: str, message: str, *, line: int, param: str | None = None) -> None:
        super().__init__(message)
        self.shown = BatchError(code, message, line, param)


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct, frozen=True):
    model: str


_wire = msgspec.json.Decoder(_Wire)
_body = msgspec.json.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class LineRules:
    """What a file may hold."""

    endpoint: str
    most_lines: int
    most_line_bytes: int


@dataclass(slots=True)
class Verdict:
    """What a whole file holds."""

    total: int = 0
    errors: list[BatchError] = field(default_factory=list)
    models: dict[str, int] = field(default_factory=dict)
    """By name, the line where it is first asked for."""

    def add(self, error: BatchError) -> None:
        if len(self.errors) < ERRORS_KEPT:
            self.errors.append(error)


def read_lines(file: IO[bytes], *, most_line_bytes: int) -> Iterator[RawLine]:
    """Lines that are not blank, without their ends; a line that is too long is cut and the rest of it passed over."""
    number = 0
    while data := file.readline(most_line_bytes + 1):
        number += 1
        is_cut = len(data) > most_line_bytes and not data.endswith(b"\n")
        part = data
        while is_cut and part and not part.endswith(b"\n"):
            part = file.readline(most_line_bytes + 1)
        if data.strip():
            yield RawLine(number, data.strip(), is_cut)


def parse_line(raw: RawLine, rules: LineRules) -> Line:
    """Raises: LineError."""
    if raw.is_cut:
        message = f"This line is longer than {rules.most_line_bytes} bytes."
        raise LineError("line_too_long", message, line=raw.number)
    try:
        wire = _wire.decode(raw.data)
        _body.decode(wire.body)
    except msgspec.ValidationError as error:
        raise LineError("invalid_request", f"This line is no call: {error}.", line=raw.number) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"This line is not parseable as valid JSON: {error}."
        raise LineError("invalid_json_line", message, line=raw.number) from error
    if wire.method != "POST":
        raise LineError("invalid_method", "The method of every line must be POST.", line=raw.number, param="method")
    if wire.url != rules.endpoint:
        message = f"The url of every line must be the batch's endpoint, {rules.endpoint}."
        raise LineError("mismatched_endpoint", message, line=raw.number, param="url")
    if not wire.custom_id:
        raise LineError("missing_custom_id", "custom_id must not be empty.", line=raw.number, param="custom_id")
    return Line(raw.number, wire.custom_id, bytes(wire.body))


def check_file(file: IO[bytes], rules: LineRules, *, goes_on: Callable[[], bool] = lambda: True) -> Verdict:
    """Look at every line; stops early when `goes_on` says no."""
    verdict = Verdict()
    seen: dict[bytes, int] = {}
    for raw in read_lines(file, most_line_bytes=rules.most_line_bytes):
        if not goes_on():
            break
        verdict.total += 1
        if verdict.total > rules.most_lines:
            message = f"The file has more than the {rules.most_lines} lines a batch may have."
            verdict.add(BatchError("too_many_lines", message, raw.number))
            break
        try:
            line = parse_line(raw, rules)
        except LineError as error:
            verdict.add(error.shown)
            continue
        _check_custom_id(line, seen, verdict)
        verdict.models.setdefault(_body.decode(line.body).model, line.number)
    if verdict.total == 0:
        verdict.add(BatchError("empty_file", "The file has no lines."))
    return verdict


def _check_custom_id(line: Line, seen: dict[bytes, int], verdict: Verdict) -> None:
    # Hashes, because ids may be long and a file may have very many of them.
    name = hashlib.blake2b(line.custom_id.encode("utf-8", "surrogatepass"), digest_size=12).digest()
    first = seen.setdefault(name, line.number)
    if first != line.number:
        message = f"custom_id {line.custom_id[:64]!r} was used before, in line {first}."
        verdict.add(BatchError("duplicate_custom_id", message, line.number, "custom_id"))
