"""Batches that are cancelled before their lines were answered. Engine: none; Redis: fakeredis."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest
import pytest_asyncio

from api.batch.file_store import FileStore, content_path
from api.batch.progress import Tools
from api.batch.runner import BatchRunner, RunnerLimits
from api.calls.client import TextClient
from broker.batches import BatchDesk, BatchRecord
from harness.redis_servers import InProcessServer
from tests.api.batch.test_lease import BATCH, FIELDS, Calls
from tests.offline.batch_files import jsonl, line

LINES = jsonl([line("a"), line("b"), line("c")])


@pytest_asyncio.fixture
async def desk() -> AsyncIterator[BatchDesk]:
    client = InProcessServer().client()
    yield BatchDesk(client)
    await client.aclose()


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(str(tmp_path))


async def cancelled(desk: BatchDesk, store: FileStore, data: bytes, *, was_validated: bool) -> BatchRecord:
    """The record of a batch that was cancelled under way, and whose runner has died, once another has run it."""
    store.write(content_path("file-1"), data)
    await desk.new_batch(BATCH, FIELDS, window_s=3600, keep_s=60)
    await desk.beat(BATCH, "dead", lease_ms=1000, fields={})
    if was_validated:
        await desk.move(BATCH, "in_progress", come_from=["validating"], fields={"total": 3})
    await desk.cancel(BATCH)
    await desk.leave(BATCH, "dead")
    record = await desk.batch(BATCH)
    assert record is not None
    assert record.status == "cancelling"
    tools = Tools(cast("TextClient", Calls()), desk, store)

    assert await BatchRunner(record, tools, RunnerLimits(), runner="next").run() == "over"

    ended = await desk.batch(BATCH)
    assert ended is not None
    return ended


def errors_of(store: FileStore, record: BatchRecord) -> list[tuple[str, str]]:
    assert record.error_file_id is not None
    with store.open(content_path(record.error_file_id)) as file:
        lines = [json.loads(text) for text in file]
    return [(each["custom_id"], each["error"]["code"]) for each in lines]


@pytest.mark.parametrize("was_validated", [True, False])
async def test_each_line_without_an_answer_has_an_error_of_its_own(
    desk: BatchDesk, store: FileStore, *, was_validated: bool
) -> None:
    record = await cancelled(desk, store, LINES, was_validated=was_validated)

    assert (record.status, record.total, record.completed, record.failed) == ("cancelled", 3, 0, 3)
    assert errors_of(store, record) == [(name, "batch_cancelled") for name in "abc"]


async def test_file_that_is_no_batch_has_no_lines_to_answer_for(desk: BatchDesk, store: FileStore) -> None:
    record = await cancelled(desk, store, LINES + b"{\n", was_validated=False)

    assert (record.status, record.total, record.failed, record.error_file_id) == ("cancelled", 0, 0, None)
