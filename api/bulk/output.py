"""The file that a bulk run writes: one line per row as it is answered, and enough beside it to go on after any end.

Beside `answers.jsonl` lies `answers.jsonl.run` until every row is answered. A line that is only half there, because
its writer was killed, is cut off.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec

from api.errors import ApiConfigError
from api.text.json_text import encode_json
from broker.wire import new_id


class RunNote(msgspec.Struct, frozen=True):
    """What tells one run from another."""

    run_id: str
    generation: int
    """Rises when rows in flight were cancelled, so that they are asked for anew."""
    job: dict[str, Any]
    """The input file and every option that changes answers."""


class OutputLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One answered row."""

    line: int
    id: str
    text: str | list[str] | None = None
    """A list where several answers were asked for."""
    finish_reason: str | list[str] | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: Mapping[str, Any] | None = None


class _Seen(msgspec.Struct, frozen=True):
    line: int
    error: Any = None


@dataclass(slots=True)
class _Found:
    lines: set[int]
    failed: int
    size: int


_seen = msgspec.json.Decoder(_Seen)


class BulkOutput:
    """Open while rows are being answered."""

    def __init__(self, path: Path, note: RunNote, found: _Found) -> None:
        self.note = note
        self.done = found.lines
        """Rows answered, here or by a run before."""
        self.failed = found.failed
        self._path = path
        self._file: IO[bytes] = path.open("ab")
        self._file.truncate(found.size)

    @classmethod
    def begin(cls, path: Path, job: dict[str, Any], *, overwrite: bool) -> BulkOutput:
        """Begin a run, or go on with the one that was broken off.

        Raises:
            ApiConfigError: the file belongs to another run, or to one that is complete.
        """
        note_path = _note_path(path)
        if overwrite:
            path.unlink(missing_ok=True)
            note_path.unlink(missing_ok=True)
        if not note_path.exists():
            if path.exists():
                raise ApiConfigError(
                    f"output = {str(path)!r}: it exists and is complete; allowed: another name, or --overwrite"
                )
            note = RunNote(new_id("run"), 0, job)
            _write_whole(note_path, msgspec.json.encode(note))
            return cls(path, note, _Found(set(), 0, 0))
        note = msgspec.json.decode(note_path.read_bytes(), type=RunNote)
        if note.job != job:
            changed = sorted(name for name in job.keys() | note.job.keys() if note.job.get(name) != job.get(name))
            raise ApiConfigError(
                f"output = {str(path)!r}: it was begun with another {', '.join(changed)}; "
                "allowed: the same again, another name, or --overwrite"
            )
        return cls(path, note, _read(path))

    def __enter__(self) -> BulkOutput:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()

    def write(self, line: OutputLine) -> None:
        """One row, answered."""
        self._file.write(encode_json(line) + b"\n")
        self._file.flush()
        self.done.add(line.line)
        self.failed += line.error is not None

    def complete(self) -> None:
        """Every row is answered."""
        os.fsync(self._file.fileno())
        _note_path(self._path).unlink(missing_ok=True)

    def renew(self) -> None:
        """Rows in flight were cancelled; who goes on asks for them anew."""
        note = msgspec.structs.replace(self.note, generation=self.note.generation + 1)
        _write_whole(_note_path(self._path), msgspec.json.encode(note))


def _read(path: Path) -> _Found:
    found = _Found(set(), 0, 0)
    if not path.exists():
        return found
    with path.open("rb") as file:
        for data in file:
            if not data.endswith(b"\n"):
                break
            seen = _seen.decode(data)
            found.lines.add(seen.line)
            found.failed += seen.error is not None
            found.size += len(data)
    return found


def _note_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.run")


def _write_whole(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(data)
    os.replace(temporary, path)
