"""/v1/batches: create, list, look at and cancel batches. The batch worker runs them; nothing here waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import msgspec
from litestar import get, post
from litestar.params import FromPath
from litestar.types import ASGIApp
from msgspec.structs import replace

from api.batch.access import Offline, limit_of
from api.calls.prepare import ApiKeyOwner
from api.errors import ApiError, BadRequestError
from api.http.bodies import check_no_body, read_json
from api.http.dependencies import HttpRequest, OurOffline, OurPayer
from api.http.sse import JsonResponse
from api.openai.batch_schemas import BatchList, BatchRequest, batch_object, window_s
from api.openai.parsing import parse
from api.text.json_text import encode_json
from broker import keys
from broker.batches import NO_BATCH_WORKER, BatchRecord
from broker.errors import BrokerError
from broker.wire import new_id

LONGEST_WINDOW_S = 7 * 24 * 3600
KEEP_S = 30 * 24 * 3600
"""How long a batch can be looked at after its window has closed."""
LIST_MOST = 100

_decoder = msgspec.json.Decoder(BatchRequest)


@post("/v1/batches", status_code=200)
async def create_batch(request: HttpRequest, offline: OurOffline, payer: OurPayer) -> ASGIApp:
    """Have every line of a file answered."""
    body = parse(await read_json(request), _decoder)
    seconds = window_s(body.completion_window)
    if seconds > LONGEST_WINDOW_S:
        raise BadRequestError("completion_window is at most 7d.", param="completion_window")
    file = await offline.file(body.input_file_id, payer)
    if file.purpose != "batch":
        raise BadRequestError("input_file_id names a file of another purpose than batch.", param="input_file_id")
    batch_id = new_id("batch")
    fields: dict[str, str | int] = {
        "key_id": payer.key_id,
        "endpoint": body.endpoint,
        "input_file_id": file.id,
        "completion_window": body.completion_window,
        "metadata": encode_json(body.metadata).decode(),
    }
    if body.output_expires_after is not None:
        fields["output_keep_s"] = body.output_expires_after.seconds
    await offline.desk.new_batch(batch_id, fields, window_s=seconds, keep_s=KEEP_S)
    # Where this fails, the batch is open without a job; the batch worker looks for such batches and queues them.
    with contextlib.suppress(BrokerError):
        await asyncio.to_thread(offline.queue.enqueue, batch_id, window_s=seconds)
    return await _shown(offline, batch_id, payer)


@get("/v1/batches")
async def list_batches(request: HttpRequest, offline: OurOffline, payer: OurPayer) -> ASGIApp:
    """Batches, newest first, a page at a time."""
    query = request.query_params
    limit, after = limit_of(query.get("limit"), usual=20, most=LIST_MOST), query.get("after")
    records = await _page(offline, payer, after=after, limit=limit + 1)
    shown = [batch_object(record) for record in await _with_waits(offline, records[:limit])]
    return JsonResponse(
        encode_json(
            BatchList(
                data=shown,
                first_id=shown[0].id if shown else None,
                last_id=shown[-1].id if shown else None,
                has_more=len(records) > limit,
            )
        )
    )


@get("/v1/batches/{batch_id:str}")
async def get_batch(offline: OurOffline, payer: OurPayer, batch_id: FromPath[str]) -> ASGIApp:
    """One batch, with how far it has come."""
    return await _shown(offline, batch_id, payer)


@post("/v1/batches/{batch_id:str}/cancel", status_code=200)
async def cancel_batch(request: HttpRequest, offline: OurOffline, payer: OurPayer, batch_id: FromPath[str]) -> ASGIApp:
    """Have a batch end early; what is finished is delivered."""
    check_no_body(request)
    record = await offline.batch(batch_id, payer)
    status = await offline.desk.cancel(record.id)
    if status not in ("cancelling", "cancelled"):
        message = f"Cannot cancel a batch with status {status!r}."
        raise ApiError(message, status=409, kind="invalid_request_error", code="batch_not_cancellable")
    return await _shown(offline, batch_id, payer)


async def _page(offline: Offline, payer: ApiKeyOwner, *, after: str | None, limit: int) -> list[BatchRecord]:
    """Batches that still exist; ids of others are dropped, so that reading on from the last found comes to new ones."""
    index = keys.batches(payer.key_id)
    found: list[BatchRecord] = []
    while (wanted := limit - len(found)) > 0:
        page = await offline.desk.page(index, after=found[-1].id if found else after, limit=wanted)
        if not page.is_known:
            raise BadRequestError(f"after names no batch: {after!r}.", param="after")
        records = await offline.desk.batches(page.ids)
        found += [record for record in records if record is not None]
        expired = [batch_id for batch_id, record in zip(page.ids, records, strict=True) if record is None]
        await offline.desk.drop_from(index, expired)
        if len(page.ids) < wanted:
            break
    return found


async def _shown(offline: Offline, batch_id: str, payer: ApiKeyOwner) -> JsonResponse:
    (record,) = await _with_waits(offline, [await offline.batch(batch_id, payer)])
    return JsonResponse(encode_json(batch_object(record)))


async def _with_waits(offline: Offline, records: Sequence[BatchRecord]) -> list[BatchRecord]:
    """The records; those that are not over say so when there is no batch worker to run them."""
    if all(record.is_over for record in records) or await offline.desk.batch_workers():
        return list(records)
    return [record if record.is_over else replace(record, waits_for=NO_BATCH_WORKER) for record in records]
