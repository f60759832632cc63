"""The lines of a batch's input file: checked, and what is wrong with them. `api.bulk.lines` reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, NamedTuple

import msgspec

from api.bulk.lines import EncodingError, RawLine, read_lines, text_of
from api.openai.batch_schemas import BatchError

ERRORS_KEPT = 100
"""A file that is wrong throughout is described by its first lines."""


class BatchLine(NamedTuple):
    """One call of a batch."""

    number: int
    """From 1, blank lines counted."""
    custom_id: str
    body: bytes


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


def parse_line(raw: RawLine, rules: LineRules) -> BatchLine:
    """Raises: LineError."""
    if raw.is_cut:
        message = f"This line is longer than {rules.most_line_bytes} bytes."
        raise LineError("line_too_long", message, line=raw.number)
    try:
        text_of(raw.data, line=raw.number)
        wire = _wire.decode(raw.data)
        _body.decode(wire.body)
    except EncodingError as error:
        raise LineError("invalid_json_line", f"The {error}.", line=raw.number) from error
    except msgspec.ValidationError as error:
        raise LineError("invalid_request", f"This line is no call: {error}.", line=raw.number) from error
    except (msgspec.DecodeError, RecursionError) as error:
        message = f"This line is not parseable as valid JSON: {error}."
        raise LineError("invalid_json_line", message, line=raw.number) from error
    if wire.method != "POST":
        raise LineError("invalid_method", "The method of every line must be POST.", line=raw.number, param="method")
    if wire.url != rules.endpoint:
        message = f"The url of every line must be the batch's endpoint, {rules.endpoint}."
        raise LineError("mismatched_endpoint", message, line=raw.number, param="url")
    if not wire.custom_id:
        raise LineError("missing_custom_id", "custom_id must not be empty.", line=raw.number, param="custom_id")
    return BatchLine(raw.number, wire.custom_id, bytes(wire.body))


def check_file(file: IO[bytes], rules: LineRules, *, goes_on: Callable[[], bool] = lambda: True) -> Verdict:
    """Look at every line; stops early when `goes_on` says no."""
    verdict = Verdict()
    try:
        _check_lines(file, rules, verdict, goes_on)
    except EncodingError as error:
        verdict.add(BatchError("invalid_encoding", f"The file cannot be read: {error}."))
    else:
        if verdict.total == 0:
            verdict.add(BatchError("empty_file", "The file has no lines."))
    return verdict


def _check_lines(file: IO[bytes], rules: LineRules, verdict: Verdict, goes_on: Callable[[], bool]) -> None:
    """Raises: EncodingError."""
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


def _check_custom_id(line: BatchLine, seen: dict[bytes, int], verdict: Verdict) -> None:
    # Hashes, because ids may be long and a file may have very many of them.
    name = hashlib.blake2b(line.custom_id.encode("utf-8", "surrogatepass"), digest_size=12).digest()
    first = seen.setdefault(name, line.number)
    if first != line.number:
        message = f"custom_id {line.custom_id[:64]!r} was used before, in line {first}."
        verdict.add(BatchError("duplicate_custom_id", message, line.number, "custom_id"))
