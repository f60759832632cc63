"""A file's content on its way to a client that leaves. Engine: none; the client is a stand-in."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import IO, Any, cast

import pytest

from api.batch.file_store import COPY_BYTES, FileStore
from api.http.files import ContentResponse
from broker.batches import FileRecord

PIECES = 32
TAKEN = 3
ROOM = 2
"""Pieces that may be read before the loop hears that the client has left."""


class CountedFile(io.BytesIO):
    reads = 0

    def read(self, size: int | None = -1) -> bytes:
        self.reads += 1
        return super().read(size)


class OneFileStore(FileStore):
    def __init__(self, file: CountedFile) -> None:
        self._file = file

    def open(self, path: str) -> IO[bytes]:
        return self._file


class FakeClient:
    """Takes some pieces of a body and leaves; what is sent to it then goes nowhere, without a word."""

    def __init__(self, *, takes: int) -> None:
        self.body = b""
        self._takes = takes
        self._left = asyncio.Event()
        self._is_asked = False

    async def receive(self) -> dict[str, Any]:
        if not self._is_asked:
            self._is_asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] != "http.response.body" or self._left.is_set():
            return
        self.body += message["body"]
        self._takes -= 1
        if self._takes == 0:
            self._left.set()


@pytest.fixture
def file() -> CountedFile:
    return CountedFile(bytes(PIECES * COPY_BYTES))


async def send_to(client: FakeClient, file: CountedFile) -> None:
    record = FileRecord(
        id="file-1", key_id="", bytes=PIECES * COPY_BYTES, created_s=0, expires_s=1, filename="a", purpose="batch"
    )
    response = ContentResponse(OneFileStore(file), record)
    await response(cast("Any", {}), cast("Any", client.receive), cast("Any", client.send))


async def test_file_is_not_read_on_once_its_client_has_left(file: CountedFile) -> None:
    await send_to(FakeClient(takes=TAKEN), file)

    assert TAKEN <= file.reads <= TAKEN + ROOM
    assert file.closed


async def test_client_that_stays_gets_the_whole_file(file: CountedFile) -> None:
    client = FakeClient(takes=2 * PIECES)

    await send_to(client, file)

    assert client.body == bytes(PIECES * COPY_BYTES)
    assert file.closed


@pytest.mark.parametrize("name", ["Ünï côde & spaces = fun", "a::b", "c:d", "e#f?g%20h"])
def test_store_lies_in_a_directory_of_any_name(tmp_path: Path, name: str) -> None:
    store = FileStore(str(tmp_path / name))

    store.write("files/file-1", b"content")

    assert (tmp_path / name / "files" / "file-1").read_bytes() == b"content"
    assert store.list("files") == ["file-1"]
    store.delete("files/file-1")
    assert store.list("files") == []


@pytest.mark.parametrize("path", ["files/../../precious", "files/", "/etc/passwd", "files/./x", "files/\0"])
def test_store_opens_nothing_outside_of_it(tmp_path: Path, path: str) -> None:
    (tmp_path / "precious").write_text("kept")
    store = FileStore(str(tmp_path / "store"))

    for use in (store.open, store.create, store.size):
        with pytest.raises(FileNotFoundError):
            use(path)
    store.delete(path)
    assert (tmp_path / "precious").exists()
