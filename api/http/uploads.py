"""Takes a file out of a multipart upload as it arrives: straight to the store, a bounded piece in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import IO

from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

from api.batch.file_store import COPY_BYTES, FileStore, sync
from api.errors import ApiError, BadRequestError

FIELD_BYTES = 1024
"""Longest value of a form field that is not the file."""
FIELDS = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})


@dataclass(slots=True)
class Upload:
    """What arrived."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str = ""
    size: int = 0


class _Sink:
    """The file's content on its way to the store."""

    def __init__(self, file: IO[bytes], limit_bytes: int) -> None:
        self._file = file
        self._limit_bytes = limit_bytes
        self._pending = bytearray()
        self.size = 0

    async def take(self, data: bytes | bytearray) -> None:
        self.size += len(data)
        if self.size > self._limit_bytes:
            message = f"The file is larger than the {self._limit_bytes} bytes this server takes."
            raise ApiError(message, status=413, kind="invalid_request_error", param="file")
        self._pending += data
        if len(self._pending) >= COPY_BYTES:
            await self._write()

    async def finish(self) -> None:
        await self._write()
        await asyncio.to_thread(sync, self._file)

    async def _write(self) -> None:
        data, self._pending = bytes(self._pending), bytearray()
        await asyncio.to_thread(self._file.write, data)


async def receive_upload(
    body: AsyncIterator[bytes], content_type: str, store: FileStore, path: str, *, limit_bytes: int
) -> Upload:
    """Write the part named `file` to `path` and return the rest.

    Raises:
        ApiError: it is no upload, too large, or there is no file in it; nothing is left at `path` then.
    """
    kind, options = parse_options_header(content_type)
    if kind != "multipart/form-data" or not options.get("boundary"):
        raise ApiError("Send the file as multipart/form-data.", status=415, kind="invalid_request_error")
    try:
        file = await asyncio.to_thread(store.create, path)
        try:
            return await _receive(body, options["boundary"], _Sink(file, limit_bytes))
        finally:
            await asyncio.to_thread(file.close)
    except BaseException as error:
        await asyncio.shield(asyncio.to_thread(store.delete, path))
        if isinstance(error, MultipartError):
            raise BadRequestError(f"The multipart body cannot be read: {error}.") from error
        raise


async def _receive(body: AsyncIterator[bytes], boundary: str, sink: _Sink) -> Upload:
    upload = Upload()
    segment: MultipartSegment | None = None
    value = bytearray()
    has_file = False
    with PushMultipartParser(boundary, max_segment_count=8) as parser:
        async for chunk in body:
            for event in parser.parse(chunk) if chunk else ():
                if isinstance(event, MultipartSegment):
                    segment, value = event, bytearray()
                    has_file = _check(segment, has_file=has_file, upload=upload)
                elif event and segment is not None and segment.name == "file":
                    await sink.take(event)
                elif event:
                    value += event
                    if len(value) > FIELD_BYTES:
                        raise BadRequestError("A form field is too long.", param=segment.name if segment else None)
                elif segment is not None and segment.name != "file":
                    upload.fields[segment.name or ""] = value.decode("utf-8", "replace")
    if not has_file:
        raise BadRequestError("Missing field: file.", param="file")
    await sink.finish()
    upload.size = sink.size
    return upload


def _check(segment: MultipartSegment, *, has_file: bool, upload: Upload) -> bool:
    """Whether the file has been seen by now."""
    if segment.name == "file":
        if has_file:
            raise BadRequestError("One file at a time.", param="file")
        upload.filename = (segment.filename or "file").replace("\\", "/").rpartition("/")[2][:255]
        return True
    if segment.name not in FIELDS:
        raise BadRequestError(f"Unknown field: {segment.name}.", param=segment.name)
    return has_file
