"""/v1/files: upload, list, look at, download and delete files. Contents are streamed both ways."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from litestar import delete, get, post
from litestar.params import FromPath
from litestar.types import ASGIApp, HTTPResponseBodyEvent, HTTPResponseStartEvent, Receive, Scope, Send

from api.batch.access import Offline, limit_of, not_found
from api.batch.file_store import FileStore, chunks, content_path
from api.calls.prepare import ApiKeyOwner
from api.errors import BadRequestError
from api.http.bodies import check_no_body, read_decoded
from api.http.dependencies import HttpRequest, OurOffline, OurPayer, OurServices
from api.http.sse import JsonResponse
from api.http.uploads import Upload, receive_upload
from api.openai.batch_schemas import File, FileDeleted, FileList, file_object
from api.text.json_text import encode_json
from broker import keys
from broker.batches import FileRecord
from broker.wire import new_id

KEEP_S = 30 * 24 * 3600
"""How long a file is kept that names no other time."""
KEEP_LEAST_S, KEEP_MOST_S = 3600, 2_592_000
LIST_MOST = 10_000


@post("/v1/files", status_code=200, request_max_body_size=None)
async def create_file(request: HttpRequest, services: OurServices, offline: OurOffline, payer: OurPayer) -> ASGIApp:
    """Upload a file for a batch."""
    file_id = new_id("file")
    upload = await receive_upload(
        read_decoded(request),
        request.headers.get("content-type", ""),
        offline.store,
        content_path(file_id),
        limit_bytes=services.config.file_limit_bytes,
    )
    try:
        record = await _record(file_id, upload, offline, payer)
        await offline.desk.put_file(record)
    except BaseException:
        await asyncio.shield(asyncio.to_thread(offline.store.delete, content_path(file_id)))
        raise
    return _json(file_object(record))


@get("/v1/files")
async def list_files(request: HttpRequest, offline: OurOffline, payer: OurPayer) -> ASGIApp:
    """Files by age, a page at a time."""
    query = request.query_params
    limit = limit_of(query.get("limit"), usual=LIST_MOST, most=LIST_MOST)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequestError("order is asc or desc.", param="order")
    records = await _page(offline, payer, query, limit=limit + 1, is_newest_first=order == "desc")
    shown = [file_object(record) for record in records[:limit]]
    page = FileList(
        data=shown,
        first_id=shown[0].id if shown else None,
        last_id=shown[-1].id if shown else None,
        has_more=len(records) > limit,
    )
    return _json(page)


@get("/v1/files/{file_id:str}")
async def get_file(offline: OurOffline, payer: OurPayer, file_id: FromPath[str]) -> ASGIApp:
    """One file."""
    return _json(file_object(await offline.file(file_id, payer)))


@get("/v1/files/{file_id:str}/content")
async def get_file_content(offline: OurOffline, payer: OurPayer, file_id: FromPath[str]) -> ASGIApp:
    """What is in it."""
    record = await offline.file(file_id, payer)
    return ContentResponse(offline.store, record)


@delete("/v1/files/{file_id:str}", status_code=200)
async def delete_file(request: HttpRequest, offline: OurOffline, payer: OurPayer, file_id: FromPath[str]) -> ASGIApp:
    """Remove a file."""
    check_no_body(request)
    record = await offline.file(file_id, payer)
    await offline.desk.drop_file(record)
    await asyncio.to_thread(offline.store.delete, content_path(file_id))
    return _json(FileDeleted(file_id))


class ContentResponse:
    """A file's content, a bounded piece in memory; no more of it is read once the client has left."""

    def __init__(self, store: FileStore, record: FileRecord) -> None:
        self._store = store
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            file = await asyncio.to_thread(self._store.open, content_path(self._record.id))
        except FileNotFoundError as error:
            raise not_found("file", self._record.id) from error
        headers = {"content-type": "application/octet-stream", "content-length": str(self._record.bytes)}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        gone = asyncio.create_task(_until_gone(receive), name="disconnect-watcher")
        try:
            start: HTTPResponseStartEvent = {"type": "http.response.start", "status": 200, "headers": raw}
            await send(start)
            pieces = chunks(file)
            while data := await asyncio.to_thread(next, pieces, b""):
                await send(_piece(data, more=True))
                if gone.done():
                    return
            await send(_piece(b"", more=False))
        finally:
            gone.cancel()
            await asyncio.shield(asyncio.to_thread(file.close))


async def _record(file_id: str, upload: Upload, offline: Offline, payer: ApiKeyOwner) -> FileRecord:
    purpose = upload.fields.get("purpose")
    if purpose != "batch":
        raise BadRequestError("purpose must be batch; files serve nothing else here.", param="purpose")
    created_s = await offline.desk.now_ms() // 1000
    return FileRecord(
        id=file_id,
        key_id=payer.key_id,
        bytes=upload.size,
        created_s=created_s,
        expires_s=created_s + _keep_s(upload.fields),
        filename=upload.filename,
        purpose=purpose,
    )


def _keep_s(fields: Mapping[str, str]) -> int:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return KEEP_S
    if anchor != "created_at":
        raise BadRequestError("The anchor of expires_after is created_at.", param="expires_after[anchor]")
    is_number = seconds is not None and seconds.isascii() and seconds.isdigit() and len(seconds) < 9
    if not is_number or not KEEP_LEAST_S <= int(seconds or 0) <= KEEP_MOST_S:
        allowed = f"Seconds of expires_after are a whole number from {KEEP_LEAST_S} to {KEEP_MOST_S}."
        raise BadRequestError(allowed, param="expires_after[seconds]")
    return int(seconds or 0)


async def _page(
    offline: Offline, payer: ApiKeyOwner, query: Mapping[str, str], *, limit: int, is_newest_first: bool
) -> list[FileRecord]:
    index, after, purpose = keys.files(payer.key_id), query.get("after"), query.get("purpose")
    found: list[FileRecord] = []
    while len(found) < limit:
        page = await offline.desk.page(index, after=after, limit=limit, is_newest_first=is_newest_first)
        if not page.is_known:
            raise BadRequestError(f"after names no file: {after!r}.", param="after")
        if not page.ids:
            break
        after = page.ids[-1]
        records = await offline.desk.files(page.ids)
        found += [record for record in records if purpose in (None, record.purpose)]
        await offline.desk.drop_from(index, sorted(set(page.ids[:-1]) - {record.id for record in records}))
    return found[:limit]


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _piece(data: bytes, *, more: bool) -> HTTPResponseBodyEvent:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _json(value: File | FileList | FileDeleted) -> JsonResponse:
    return JsonResponse(encode_json(value))
