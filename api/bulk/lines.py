"""Text files as people have them, read as UTF-8: byte-order marks, UTF-16, other encodings, CR LF, bounded lines.

The one reader of lines for bulk runs and batches. A line ends at a line feed and nowhere else, so the separators that
Unicode has beside it stay within the text.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from typing import IO, NamedTuple

MOST_LINE_BYTES = 64 << 20
READ_BYTES = 1 << 16
WINDOWS = "cp1252"
"""What spreadsheets on Windows write by themselves; it has the characters of Latin-1, and more."""
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16, whose mark is its beginning
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


class EncodingError(ValueError):
    """A file is not in the encoding that it was taken for; says which, and what to do."""


class RawLine(NamedTuple):
    number: int
    """From 1, blank lines counted."""
    data: bytes
    """UTF-8, if the file is in the encoding that it seems to be in; without the line's end."""
    is_cut: bool = False
    """The line was longer than allowed; `data` is its beginning."""


def read_lines(file: IO[bytes], *, most_line_bytes: int = MOST_LINE_BYTES, encoding: str = "") -> Iterator[RawLine]:
    """Lines that are not blank; a line that is too long is cut and the rest of it passed over.

    Args:
        encoding: what the file is in; by itself what its mark says, else UTF-8.

    Raises:
        EncodingError: the file is not in UTF-16, or not in the encoding that was named.
    """
    number, source = 0, as_utf8(file, encoding=encoding)
    while data := source.readline(most_line_bytes + 1):
        number += 1
        is_cut = len(data) > most_line_bytes and not data.endswith(b"\n")
        part = data
        while is_cut and part and not part.endswith(b"\n"):
            part = source.readline(most_line_bytes + 1)
        if data.strip():
            yield RawLine(number, data.rstrip(b"\r\n"), is_cut)


def as_utf8(file: IO[bytes], *, encoding: str = "") -> IO[bytes]:
    """A file from its beginning, behind its mark, as UTF-8; UTF-8 itself is passed on as it is, unchecked."""
    head = file.read(4)
    mark, found = next(((mark, name) for mark, name in _MARKS if head.startswith(mark)), (b"", _unmarked(head)))
    file.seek(len(mark))
    wanted = found if mark or not encoding else encoding
    return file if codecs.lookup(wanted).name == "utf-8" else io.BufferedReader(_Recoded(file, wanted), READ_BYTES)


def text_of(data: bytes, *, line: int) -> str:
    """A line as text. Raises: EncodingError."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise EncodingError(f"line {line} {not_utf8(error)}") from error


def not_utf8(error: UnicodeDecodeError) -> str:
    """What is wrong with text that is not UTF-8, and what to do."""
    return (
        f"is not UTF-8 (byte 0x{error.object[error.start]:02x}) but perhaps Latin-1 or Windows-1252 ({WINDOWS}); "
        f"allowed: the file saved as UTF-8, such as by iconv -f {WINDOWS} -t UTF-8"
    )


def _unmarked(head: bytes) -> str:
    """The encoding of a file without a mark. Text in UTF-16 that begins with an ASCII character shows by a zero."""
    if len(head) < 2 or bool(head[0]) == bool(head[1]):
        return "utf-8"
    return "utf-16-le" if head[0] else "utf-16-be"


class _Recoded(io.RawIOBase):
    """A file in another encoding as UTF-8."""

    def __init__(self, file: IO[bytes], encoding: str) -> None:
        self._file = file
        self._encoding = encoding
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._rest = b""
        self._is_over = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # any buffer there, this one is called
        while not self._rest and not self._is_over:
            data = self._file.read(READ_BYTES)
            self._is_over = not data
            try:
                self._rest = self._decoder.decode(data, final=self._is_over).encode()
            except UnicodeError as error:
                raise EncodingError(f"the file is not in {self._encoding}, as it seemed: {error}") from error
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count
