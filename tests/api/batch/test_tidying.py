"""What the batch worker does between batches: lost jobs, failed jobs, expired files; and what RQ's own tools see.

Runs on no engine, with a child `redis-server`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
from redis.asyncio import Redis
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from api.batch.file_store import FileStore, content_path
from api.batch.queue import BatchQueue, connect_blocking
from api.batch.worker import ORPHAN_S, BatchWorkerConfig, run_batch_worker, tidy_up
from broker import keys
from broker.batches import BatchDesk, FileRecord
from harness.redis_servers import ChildServer, child_server

FIELDS: dict[str, str | int] = {
    "key_id": "",
    "endpoint": "/v1/completions",
    "input_file_id": "file-1",
    "completion_window": "1h",
}


@pytest.fixture
def server() -> Iterator[ChildServer]:
    with child_server("redis") as server:
        yield server


@pytest_asyncio.fixture
async def client(server: ChildServer) -> AsyncIterator[Redis]:
    client = server.client()
    yield client
    await client.aclose()


@pytest.fixture
def desk(client: Redis) -> BatchDesk:
    return BatchDesk(client)


@pytest.fixture
def queue(server: ChildServer) -> Iterator[BatchQueue]:
    queue = BatchQueue(connect_blocking(server.url))
    yield queue
    queue.close()


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(str(tmp_path))


async def begin(desk: BatchDesk, client: Redis, *, age_s: int = 0) -> None:
    await desk.new_batch("batch-1", FIELDS, window_s=3600, keep_s=60)
    await cast("Any", client.hincrby(keys.batch("batch-1"), "created_at", -age_s))


async def test_batch_that_lost_its_job_gets_one(
    server: ChildServer, desk: BatchDesk, client: Redis, queue: BatchQueue, store: FileStore
) -> None:
    await begin(desk, client, age_s=ORPHAN_S + 1)

    await tidy_up(server.url, queue, store)

    assert queue.status("batch-1") is JobStatus.QUEUED


async def test_batch_that_was_just_made_is_left_to_whoever_makes_it(
    server: ChildServer, desk: BatchDesk, client: Redis, queue: BatchQueue, store: FileStore
) -> None:
    await begin(desk, client)

    await tidy_up(server.url, queue, store)

    assert queue.status("batch-1") is None


async def test_batch_whose_job_was_given_up_fails_and_says_so(
    server: ChildServer, desk: BatchDesk, client: Redis, queue: BatchQueue, store: FileStore
) -> None:
    await begin(desk, client)
    queue.enqueue("batch-1", window_s=60)
    Job.fetch("batch-1", connection=queue.queue.connection, serializer=JSONSerializer).set_status(JobStatus.FAILED)

    await tidy_up(server.url, queue, store)

    record = await desk.batch("batch-1")
    assert record is not None
    assert record.status == "failed"
    assert json.loads(record.errors)[0]["code"] == "job_failed"


async def test_content_of_an_expired_file_is_removed(
    server: ChildServer, desk: BatchDesk, queue: BatchQueue, store: FileStore
) -> None:
    store.write(content_path("file-old"), b"old")
    store.write(content_path("file-new"), b"new")
    now_s = await desk.now_ms() // 1000
    for file_id, expires_s in (("file-old", now_s - 1), ("file-new", now_s + 60)):
        await desk.put_file(
            FileRecord(
                id=file_id, key_id="", bytes=3, created_s=now_s - 60, expires_s=expires_s, filename="a", purpose="batch"
            )
        )

    await tidy_up(server.url, queue, store)

    assert store.list("files") == ["file-new"]
    assert await desk.ended_files() == []


async def test_batch_queued_twice_is_one_job(queue: BatchQueue) -> None:
    queue.enqueue("batch-1", window_s=60)
    queue.enqueue("batch-1", window_s=60)

    assert queue.queue.job_ids == ["batch-1"]


async def test_job_is_json_that_rqs_own_tools_read(server: ChildServer, queue: BatchQueue) -> None:
    queue.enqueue("batch-1", window_s=60)

    raw = cast("bytes", queue.queue.connection.hget("rq:job:batch-1", "data"))
    said = subprocess.run(
        [str(Path(sys.executable).parent / "rq"), "info", "--url", server.url, "--raw"],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert json.loads(zlib.decompress(raw)) == ["api.batch.jobs.run_batch", None, ["batch-1"], {}]
    assert "mtplx-batches 1" in said.stdout


def test_job_of_a_batch_that_is_gone_ends_by_itself(server: ChildServer, queue: BatchQueue, tmp_path: Path) -> None:
    queue.enqueue("batch-1", window_s=60)

    run_batch_worker(BatchWorkerConfig(server.url, str(tmp_path)), is_burst=True)

    assert queue.status("batch-1") is JobStatus.FINISHED


def test_batch_worker_imports_neither_mlx_nor_the_web_framework() -> None:
    program = "import sys, api.batch.worker; print({'litestar', 'uvicorn', 'mlx'} & set(sys.modules))"

    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert said.stdout.strip() == "set()"
