"""What a batch has answered so far: parts in the file store, each written whole, and the files made of them at the end.

A result is in a part or it is not finished. Two runners may have written the same line, one of them thought dead; the
first counts, so a line is in the files once. Blocks: call it from a thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Literal, NamedTuple

import msgspec

from api.batch.file_store import FileStore, sync

Kind = Literal["output", "error"]
KINDS: Sequence[Kind] = ("output", "error")


class Result(NamedTuple):
    """The answer to one line."""

    number: int
    kind: Kind
    data: bytes
    """The line of the output or error file, with its end."""
    input_tokens: int = 0
    output_tokens: int = 0
    request_ids: Sequence[str] = ()
    """Its requests, whose records are not needed any more once this is written."""


@dataclass(slots=True)
class LineCounts:
    """How many lines are answered, and which."""

    counts: dict[Kind, int] = field(default_factory=lambda: {"output": 0, "error": 0})
    input_tokens: int = 0
    output_tokens: int = 0
    _done: set[int] = field(default_factory=set)

    def has(self, number: int) -> bool:
        return number in self._done

    def add(self, number: int, kind: Kind, *, input_tokens: int, output_tokens: int) -> bool:
        """Whether this line is new."""
        if number in self._done:
            return False
        self._done.add(number)
        self.counts[kind] += 1
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens
        return True

    @property
    def fields(self) -> dict[str, str | int]:
        """As they are shown in the batch's record."""
        return {
            "completed": self.counts["output"],
            "failed": self.counts["error"],
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
        }


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _AnswerBody(msgspec.Struct, frozen=True):
    usage: _Usage = _Usage()


class _Response(msgspec.Struct, frozen=True):
    body: _AnswerBody = _AnswerBody()


class _Written(msgspec.Struct, frozen=True):
    """As much of a result's line as is needed to know it again."""

    id: str
    response: _Response | None = None

    @property
    def number(self) -> int:
        return int(self.id.rpartition("-")[2])

    @property
    def usage(self) -> _Usage:
        return self.response.body.usage if self.response is not None else _Usage()


_written = msgspec.json.Decoder(_Written)


class Parts:
    """The parts of one batch; new ones are this runner's."""

    def __init__(self, store: FileStore, batch_id: str, runner: str) -> None:
        self._store = store
        self._folder = f"batches/{batch_id}"
        self._runner = runner
        self._written = 0

    def write(self, results: Sequence[Result]) -> None:
        """Results, safe from now on."""
        self._written += 1
        for kind in KINDS:
            lines = [result.data for result in results if result.kind == kind]
            if lines:
                name = f"{kind}.{self._written:06}.{self._runner}.jsonl"
                self._store.write(f"{self._folder}/{name}", b"".join(lines))

    def tally(self) -> LineCounts:
        """What all runners have written together."""
        tally = LineCounts()
        for _ in self._new_lines(tally, KINDS):
            pass
        return tally

    def join(self, kind: Kind, tally: LineCounts, file: IO[bytes]) -> int:
        """Write every line of a kind that `tally` does not have yet; returns how many bytes they are."""
        size = 0
        for data in self._new_lines(tally, (kind,)):
            size += file.write(data)
        sync(file)
        return size

    def delete(self) -> None:
        self._store.delete(self._folder)

    def _new_lines(self, tally: LineCounts, kinds: Sequence[Kind]) -> Iterator[bytes]:
        for kind in kinds:
            for name in self._store.list(self._folder):
                if name.startswith(f"{kind}."):
                    yield from self._new_of(name, kind, tally)

    def _new_of(self, name: str, kind: Kind, tally: LineCounts) -> Iterator[bytes]:
        with self._store.open(f"{self._folder}/{name}") as file:
            for data in file:
                if not data.endswith(b"\n"):
                    return  # its writer died in the middle of it; the line is not finished
                written = _written.decode(data)
                usage = written.usage
                tokens = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
                if tally.add(written.number, kind, **tokens):
                    yield data
