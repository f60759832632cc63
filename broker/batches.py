"""Batches and files as Redis knows them: records, indexes, the runner's lease. Contents lie in the file store.

Wraps the scripts BATCH_*, FILE_PUT and FORGET; times are Redis'.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import msgspec
from redis.asyncio import Redis

from broker import keys
from broker.connection.connect import translated
from broker.scripts import source

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
Guard = Callable[[], contextlib.AbstractAsyncContextManager[None]]
STUB_MS = 3600 * 1000
"""Longer than a process may be stopped and still act on what it thought before."""
OVER: frozenset[str] = frozenset({"failed", "completed", "expired", "cancelled"})
NO_BATCH_WORKER = "no batch worker runs; start one with: mtplx batch-worker"


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file whose content is stored."""

    id: str
    key_id: str
    bytes: int
    created_s: int
    expires_s: int
    filename: str
    purpose: str


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch; the names are those of OpenAI's object, which is made of it."""

    id: str
    key_id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: BatchStatus
    created_at: int
    expires_at: int
    metadata: str = "null"
    """JSON."""
    errors: str = "[]"
    """JSON: what validation found."""
    model: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    output_keep_s: int = 30 * 24 * 3600
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    waits_for: str = ""
    """What keeps it from going on, such as a model nobody serves; empty when it goes on."""

    @property
    def is_over(self) -> bool:
        return self.status in OVER


class BatchWorkerRecord(NamedTuple):
    """A batch worker as RQ knows it."""

    name: str
    host: str
    pid: str


class Beat(NamedTuple):
    """What a runner learns when it says that it lives."""

    status: str
    """`lost`: another runner has the batch; empty: there is no such batch."""
    expires_s: int
    now_ms: int


class Page(NamedTuple):
    """Ids of a listing."""

    ids: Sequence[str]
    is_known: bool = True
    """False when the id to begin after is not in the listing."""


class BatchDesk:
    """All of it, over one command client.

    Args:
        client: stays the caller's to close.
        guard: entered around every question; ends it when Redis falls silent, where whoever asks will not wait.
    """

    def __init__(self, client: Redis, *, guard: Guard = contextlib.nullcontext) -> None:
        self._client = client
        self._guard = guard
        names = ("batch_new", "batch_move", "batch_cancel", "batch_beat", "forget", "file_put")
        self._scripts = {name: client.register_script(source(name)) for name in names}

    async def now_ms(self) -> int:
        """Redis' clock."""
        async with self._asking():
            seconds, micros = await cast("Any", self._client.time())
        return int(seconds) * 1000 + int(micros) // 1000

    async def put_file(self, record: FileRecord) -> None:
        """FILE_PUT."""
        ttl_ms = max(1, record.expires_s - record.created_s) * 1000
        await self._run(
            "file_put",
            [keys.file(record.id), keys.files(record.key_id), keys.FILE_ENDS],
            [record.id, msgspec.msgpack.encode(record), ttl_ms, record.expires_s],
        )

    async def file(self, file_id: str) -> FileRecord | None:
        async with self._asking():
            data = await cast("Any", self._client.get(keys.file(file_id)))
        return None if data is None else msgspec.msgpack.decode(data, type=FileRecord)

    async def files(self, file_ids: Sequence[str]) -> list[FileRecord]:
        """Those that still exist, in this order."""
        async with self._asking():
            found: list[Any] = await self._client.mget([keys.file(each) for each in file_ids]) if file_ids else []
        return [msgspec.msgpack.decode(data, type=FileRecord) for data in found if data is not None]

    async def drop_file(self, record: FileRecord) -> None:
        """The record goes; whoever calls removes the content."""
        async with self._asking():
            pipe = self._client.pipeline(transaction=True)
            pipe.delete(keys.file(record.id))
            pipe.zrem(keys.files(record.key_id), record.id)
            pipe.zrem(keys.FILE_ENDS, record.id)
            await pipe.execute()

    async def ended_files(self, *, most: int = 100) -> list[str]:
        """Files whose time is over and whose content is still to be removed."""
        now_s = await self.now_ms() // 1000
        async with self._asking():
            raw = await cast("Any", self._client.zrangebyscore(keys.FILE_ENDS, 0, now_s, start=0, num=most))
        return [file_id.decode() for file_id in raw]

    async def forget_ended_file(self, file_id: str) -> None:
        """The content of an ended file was removed."""
        async with self._asking():
            await cast("Any", self._client.zrem(keys.FILE_ENDS, file_id))

    async def page(self, index: str, *, after: str | None, limit: int, is_newest_first: bool = True) -> Page:
        """Ids out of `keys.files(...)` or `keys.batches(...)`; some may have expired."""
        client = cast("Any", self._client)
        rank_of, read = (client.zrevrank, client.zrevrange) if is_newest_first else (client.zrank, client.zrange)
        async with self._asking():
            start = 0
            if after is not None:
                rank = await rank_of(index, after)
                if rank is None:
                    return Page((), is_known=False)
                start = int(rank) + 1
            raw = await read(index, start, start + limit - 1)
        return Page([each.decode() for each in raw])

    async def drop_from(self, index: str, ids: Sequence[str]) -> None:
        """Take expired ids out of a listing."""
        if ids:
            async with self._asking():
                await cast("Any", self._client.zrem(index, *ids))

    async def new_batch(self, batch_id: str, fields: Mapping[str, str | int], *, window_s: int, keep_s: int) -> None:
        """BATCH_NEW; its record is kept for `keep_s` beyond the window."""
        await self._run(
            "batch_new",
            [keys.batch(batch_id), keys.batches(str(fields["key_id"])), keys.OPEN_BATCHES],
            [batch_id, (window_s + keep_s) * 1000, window_s, *_flat(fields)],
        )

    async def batch(self, batch_id: str) -> BatchRecord | None:
        return (await self.batches([batch_id]))[0]

    async def batches(self, batch_ids: Sequence[str]) -> list[BatchRecord | None]:
        async with self._asking():
            pipe = self._client.pipeline(transaction=False)
            for batch_id in batch_ids:
                pipe.hgetall(keys.batch(batch_id))
            found = await pipe.execute() if batch_ids else []
        return [_record(raw) for raw in found]

    async def open_batches(self) -> list[BatchRecord]:
        """Batches that have not ended, oldest first; ids of those whose record has expired are dropped."""
        async with self._asking():
            raw = await cast("Any", self._client.smembers(keys.OPEN_BATCHES))
        ids = [batch_id.decode() for batch_id in raw]
        found = dict(zip(ids, await self.batches(ids), strict=True))
        if expired := [batch_id for batch_id, record in found.items() if record is None]:
            async with self._asking():
                await cast("Any", self._client.srem(keys.OPEN_BATCHES, *expired))
        records = [record for record in found.values() if record is not None]
        return sorted(records, key=lambda each: (each.created_at, each.id))

    async def batch_workers(self) -> list[BatchWorkerRecord]:
        """Those whose record has not expired."""
        async with self._asking():
            names = sorted(await cast("Any", self._client.smembers(keys.BATCH_WORKERS)))
            pipe = self._client.pipeline(transaction=False)
            for name in names:
                pipe.hmget(name, "birth", "death", "hostname", "pid")
            found = await pipe.execute() if names else []
        return [
            BatchWorkerRecord(name.decode().rpartition(":")[2], (host or b"").decode(), (pid or b"").decode())
            for name, (birth, death, host, pid) in zip(names, found, strict=True)
            if birth is not None and death is None
        ]

    async def move(
        self,
        batch_id: str,
        to: BatchStatus,
        *,
        come_from: Sequence[BatchStatus],
        runner: str = "",
        fields: Mapping[str, str | int] | None = None,
    ) -> str:
        """BATCH_MOVE; the status afterwards, `lost` or empty as there."""
        reply = await self._run(
            "batch_move",
            [keys.batch(batch_id), keys.OPEN_BATCHES, keys.batch_lease(batch_id)],
            [batch_id, runner, f" {' '.join(come_from)} ", to, int(to in OVER), *_flat(fields or {})],
        )
        return str(reply.decode())

    async def cancel(self, batch_id: str) -> str:
        """BATCH_CANCEL; the status afterwards, empty when there is no such batch."""
        reply = await self._run(
            "batch_cancel", [keys.batch(batch_id), keys.OPEN_BATCHES, keys.batch_lease(batch_id)], [batch_id]
        )
        return str(reply.decode())

    async def beat(self, batch_id: str, runner: str, *, lease_ms: int, fields: Mapping[str, str | int]) -> Beat:
        """BATCH_BEAT."""
        status, expires_s, now_ms = await self._run(
            "batch_beat", [keys.batch(batch_id), keys.batch_lease(batch_id)], [runner, lease_ms, *_flat(fields)]
        )
        return Beat(status.decode(), int(expires_s), int(now_ms))

    async def leave(self, batch_id: str, runner: str) -> None:
        """Give the lease back, so that the next runner need not wait for its end."""
        await self.beat(batch_id, runner, lease_ms=0, fields={})

    async def forget(self, request_ids: Sequence[str], *, stub_ms: int = STUB_MS) -> int:
        """FORGET; how many records went."""
        names = [name for each in request_ids for name in (keys.state(each), keys.log(each), keys.logprobs(each))]
        return int(await self._run("forget", names, [stub_ms, *request_ids])) if names else 0

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        async with self._guard():
            with translated():
                yield

    async def _run(self, name: str, script_keys: Sequence[str], args: Sequence[Any]) -> Any:
        async with self._asking():
            return await self._scripts[name](keys=script_keys, args=args)


def _flat(fields: Mapping[str, str | int]) -> list[str | int]:
    return [part for pair in fields.items() for part in pair]


def _record(raw: Mapping[bytes, bytes]) -> BatchRecord | None:
    if not raw:
        return None
    # Texts that look like numbers or null must not be taken for such.
    texts = {"id", "key_id", "metadata", "errors", "waits_for", "model", "output_file_id", "error_file_id"}
    fields: dict[str, Any] = {}
    for name, value in raw.items():
        text = value.decode()
        fields[name.decode()] = text if name.decode() in texts or not text.isdigit() else int(text)
    return msgspec.convert(fields, BatchRecord)
