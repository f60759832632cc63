"""What the Files and Batches routes work with: records, contents, and the queue of jobs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from redis.asyncio import Redis

from api.batch.file_store import FileStore
from api.batch.queue import BatchQueue, connect_blocking
from api.calls.prepare import ApiKeyOwner
from api.errors import ApiError, BadRequestError
from broker.batches import BatchDesk, BatchRecord, FileRecord, Guard
from broker.connection.connect import connect


@dataclass(frozen=True, slots=True)
class Offline:
    """One process's access to files and batches."""

    desk: BatchDesk
    store: FileStore
    queue: BatchQueue
    client: Redis

    @classmethod
    def over(cls, redis_url: str, files_url: str, *, guard: Guard) -> Offline:
        """Connects when it is first used. Raises: ApiConfigError, BrokerConfigError."""
        client = connect(redis_url)
        return cls(
            BatchDesk(client, guard=guard), FileStore(files_url), BatchQueue(connect_blocking(redis_url)), client
        )

    async def file(self, file_id: str, payer: ApiKeyOwner) -> FileRecord:
        """A file of this payer. Raises: ApiError, BrokerUnavailableError."""
        record = await self.desk.file(file_id)
        if record is None or record.key_id != payer.key_id:
            raise not_found("file", file_id)
        return record

    async def batch(self, batch_id: str, payer: ApiKeyOwner) -> BatchRecord:
        """A batch of this payer. Raises: ApiError, BrokerUnavailableError."""
        record = await self.desk.batch(batch_id)
        if record is None or record.key_id != payer.key_id:
            raise not_found("batch", batch_id)
        return record

    async def close(self) -> None:
        await self.client.aclose()
        await asyncio.to_thread(self.queue.close)


def not_found(what: str, name: str) -> ApiError:
    """Also the answer for what belongs to somebody else: whether it exists is not theirs to know."""
    return ApiError(
        f"No such {what}: {name!r}.", status=404, kind="invalid_request_error", code="not_found", param="id"
    )


def limit_of(text: str | None, *, usual: int, most: int) -> int:
    """The `limit` of a listing. Raises: BadRequestError."""
    if text is None:
        return usual
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= most):
        raise BadRequestError(f"limit is a whole number from 1 to {most}.", param="limit")
    return int(text)
