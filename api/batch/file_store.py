"""Where contents of files lie: a directory, or any place that fsspec knows by URL. Blocks: call it from a thread.

Records of files are the broker's; a content without a record is not a file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import IO, Any, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from api.errors import ApiConfigError

COPY_BYTES = 1 << 20


class FileStore:
    """Paths are relative to the store's URL."""

    def __init__(self, url: str) -> None:
        """Raises: ApiConfigError when no such kind of place is known."""
        if "://" not in url:  # fsspec would read a directory's name as a URL where it has `::` or a colon in it
            self._files, self._root = LocalFileSystem(), os.path.abspath(url)
            return
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ApiConfigError(
                f"files_url = {url!r}: {error}; allowed: a directory, or a URL fsspec reads"
            ) from error

    def create(self, path: str) -> IO[bytes]:
        """Open for writing, over whatever is there."""
        full = self._full(path)
        self._files.makedirs(full.rpartition("/")[0], exist_ok=True)
        return cast("IO[bytes]", self._files.open(full, "wb"))

    def open(self, path: str) -> IO[bytes]:
        """Open for reading. Raises: FileNotFoundError."""
        return cast("IO[bytes]", self._files.open(self._full(path), "rb"))

    def write(self, path: str, data: bytes) -> None:
        """Write a whole content and have it on disk, as far as the place can."""
        with self.create(path) as file:
            file.write(data)
            sync(file)

    def size(self, path: str) -> int:
        """Raises: FileNotFoundError."""
        return int(self._files.size(self._full(path)))

    def list(self, folder: str) -> list[str]:
        """Names in a folder, sorted; none when there is no such folder."""
        try:
            found = self._files.ls(self._full(folder), detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(name).rpartition("/")[2] for name in found)

    def delete(self, path: str) -> None:
        """Delete a file or a folder; no matter if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(self._full(path), recursive=True)

    def _full(self, path: str) -> str:
        """Ids in a path come from Redis, so none may lead out of the store, nor name a whole folder by being empty.

        Raises:
            FileNotFoundError: there can be no such file.
        """
        if any(part in ("", ".", "..") or "\0" in part for part in path.split("/")):
            raise FileNotFoundError(path)
        return f"{self._root.rstrip('/')}/{path}"


def sync(file: IO[bytes]) -> None:
    """Have a local file on disk; other places see to that themselves when the file is closed."""
    file.flush()
    descriptor: Any = getattr(file, "fileno", None)
    if descriptor is not None:
        with contextlib.suppress(OSError):
            os.fsync(descriptor())


def chunks(file: IO[bytes]) -> Iterator[bytes]:
    """The rest of a file, a bounded piece at a time."""
    while data := file.read(COPY_BYTES):
        yield data


def content_path(file_id: str) -> str:
    """Where the content of a file lies."""
    return f"files/{file_id}"
