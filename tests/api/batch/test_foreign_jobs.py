"""Jobs that another holder of Redis' password puts where the batch worker finds them: none of what they name runs.

Runs on no engine, with a child `redis-server` and RQ as it is.
"""

from __future__ import annotations

import datetime
import http.server
import json
import os
import pickle
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from redis import Redis
from rq import Callback, Queue
from rq.group import Group
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer
from rq.webhook import Webhook

from api.batch.checked_job import RUN, CheckedJob
from api.batch.jobs import run_batch
from api.batch.queue import QUEUE, BatchQueue, connect_blocking
from api.batch.worker import BatchWorkerConfig, run_batch_worker
from broker import keys
from harness.redis_servers import ChildServer, child_server

BATCH = "batch-0123456789abcdef01234567"


@pytest.fixture
def server() -> Iterator[ChildServer]:
    with child_server("redis") as server:
        yield server


@pytest.fixture
def redis(server: ChildServer) -> Iterator[Redis]:
    client = connect_blocking(server.url)
    yield client
    client.close()


@pytest.fixture
def queue(redis: Redis) -> Queue:
    """RQ's own, as a stranger would use it."""
    return Queue(QUEUE, connection=redis, serializer=JSONSerializer)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A folder that appears where something was run."""
    return tmp_path / "was-run"


class Payload:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self._folder),)


def work(server: ChildServer, tmp_path: Path) -> None:
    """Run the batch worker until nothing is queued."""
    run_batch_worker(BatchWorkerConfig(redis_url=server.url, files_url=str(tmp_path / "files")), is_burst=True)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("os.mkdir", ("{marker}",)),
        ("os.system", ("mkdir '{marker}'",)),
        ("builtins.eval", ("__import__('os').mkdir('{marker}')",)),
        ("subprocess.check_call", (["mkdir", "{marker}"],)),
        (f"{RUN}.__globals__.get", ("{marker}",)),
    ],
    ids=["call", "shell", "eval", "program", "attribute of ours"],
)
def test_function_of_a_job_is_not_run_unless_it_is_ours(
    server: ChildServer, queue: Queue, tmp_path: Path, marker: Path, function: str, arguments: tuple[Any, ...]
) -> None:
    filled = [
        [word.format(marker=marker) for word in each] if isinstance(each, list) else each.format(marker=marker)
        for each in arguments
    ]
    job = queue.enqueue_call(function, args=tuple(filled), retry=None)

    work(server, tmp_path)

    assert not marker.exists()
    assert job.get_status() is JobStatus.FAILED


@pytest.mark.parametrize(
    "call",
    [
        (RUN, None, [], {}),
        (RUN, None, ["batch-another"], {}),
        (RUN, None, [BATCH, "more"], {}),
        (RUN, None, [BATCH], {"more": 1}),
        (RUN, None, BATCH, {}),
        (RUN, {"an": "instance"}, [BATCH], {}),
        ("__class__", "text", [BATCH], {}),
        ([RUN], None, [BATCH], {}),
        (RUN, None),
        None,
    ],
    ids=str,
)
def test_call_of_our_function_is_checked(redis: Redis, call: Any) -> None:
    job = CheckedJob(id=BATCH, connection=redis, serializer=JSONSerializer)
    job.data = json.dumps(call).encode()

    assert not job.is_ours


def test_call_that_a_batch_is_queued_with_is_ours(redis: Redis) -> None:
    BatchQueue(redis).enqueue(BATCH, window_s=60)

    job = cast("CheckedJob", CheckedJob.fetch(BATCH, connection=redis, serializer=JSONSerializer))
    assert job.is_ours


def test_batch_that_version_0_1_queued_is_run(redis: Redis) -> None:
    """RQ keeps the path of a job's function; this one is of before the module moved."""
    job = CheckedJob(id=BATCH, connection=redis, serializer=JSONSerializer)
    job.data = json.dumps(("api.batch_jobs.run_batch", None, [BATCH], {})).encode()

    assert job.is_ours
    assert job.func is run_batch


@pytest.mark.parametrize("which", ["on_success", "on_failure", "on_stopped"])
@pytest.mark.parametrize("function", [RUN, "os.mkdir"], ids=["of a batch", "of another job"])
def test_callback_of_a_job_is_not_run(
    server: ChildServer, queue: Queue, redis: Redis, tmp_path: Path, marker: Path, which: str, function: str
) -> None:
    options: dict[str, Any] = {which: Callback("os.mkdir")}
    job = queue.enqueue_call(function, args=(BATCH,), job_id=BATCH, **options)
    # The callback's first argument is the job; as text, that is what `mkdir` makes where it is called.
    redis.hset(job.key, f"{which[3:]}_callback_name", "tests.api.batch.test_foreign_jobs.note_call")
    NOTED.clear()

    work(server, tmp_path)

    assert NOTED == []


NOTED: list[object] = []


def note_call(*arguments: object) -> None:
    """A callback that leaves a trace."""
    NOTED.append(arguments)


def test_webhook_of_a_batch_is_not_sent(server: ChildServer, queue: Queue, tmp_path: Path) -> None:
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{web.server_port}/hook"
        hooks = [Webhook(url, "finished"), Webhook(url, "failed")]
        queue.enqueue_call(RUN, args=(BATCH,), job_id=BATCH, webhooks=hooks)
        queue.enqueue_call("os.getpid", webhooks=hooks)

        work(server, tmp_path)
        web.shutdown()

    assert asked == []


@pytest.mark.parametrize("field", ["result", "meta", "data"])
def test_pickle_in_a_job_is_not_read(
    server: ChildServer, queue: Queue, redis: Redis, tmp_path: Path, marker: Path, field: str
) -> None:
    job = queue.enqueue_call(RUN, args=(BATCH,), job_id=BATCH)
    redis.hset(job.key, field, zlib.compress(pickle.dumps(Payload(marker))))
    redis.hset(job.key, "meta" if field == "result" else "result", pickle.dumps(Payload(marker)))

    work(server, tmp_path)

    assert not marker.exists()


def test_pickle_in_a_group_is_not_read(server: ChildServer, redis: Redis, tmp_path: Path, marker: Path) -> None:
    group = Group(redis, "a-group")
    redis.sadd(Group.REDIS_GROUP_KEY, group.name)
    redis.sadd(group.key, "a-job")
    redis.hset("rq:job:a-job", mapping={"data": b"x", "result": pickle.dumps(Payload(marker))})

    work(server, tmp_path)

    assert not marker.exists()


def test_callback_of_an_abandoned_job_is_not_run(
    server: ChildServer, queue: Queue, redis: Redis, tmp_path: Path
) -> None:
    job = queue.enqueue_call(RUN, args=(BATCH,), job_id=BATCH)
    redis.delete(queue.key)
    redis.hset(job.key, mapping={"status": "started", "failure_callback_name": f"{__name__}.note_call"})
    redis.zadd(queue.started_job_registry.key, {f"{job.id}:an-execution": 1})
    NOTED.clear()

    work(server, tmp_path)

    assert NOTED == []
    assert CheckedJob.fetch(job.id, connection=redis, serializer=JSONSerializer).get_status() is JobStatus.FAILED


def test_scheduled_and_dependent_jobs_do_not_run_what_they_name(
    server: ChildServer, queue: Queue, tmp_path: Path, marker: Path
) -> None:
    first = queue.enqueue_call(RUN, args=(BATCH,), job_id=BATCH)
    queue.enqueue_call("os.mkdir", args=(str(marker),), depends_on=first)
    queue.enqueue_in(datetime.timedelta(seconds=0), "os.mkdir", str(marker))

    work(server, tmp_path)

    assert not marker.exists()


@pytest.mark.parametrize("field", ["timeout", "created_at", "retries_left", "dependency_ids", "status", "repeats_left"])
def test_job_that_cannot_be_read_is_passed_over(
    server: ChildServer, queue: Queue, redis: Redis, tmp_path: Path, field: str
) -> None:
    odd = queue.enqueue_call(RUN, args=("batch-odd",), job_id="batch-odd")
    redis.hset(odd.key, field, "neither number nor date")
    BatchQueue(redis).enqueue(BATCH, window_s=60)

    work(server, tmp_path)

    ran = CheckedJob.fetch(BATCH, connection=redis, serializer=JSONSerializer)
    assert ran.get_status() is JobStatus.FINISHED
    assert redis.llen(queue.key) == 0


@pytest.mark.parametrize("file_id", ["../../precious", "", ".", "a/../../../precious"])
def test_file_outside_the_store_is_not_deleted_though_a_record_names_it(
    server: ChildServer, redis: Redis, tmp_path: Path, file_id: str
) -> None:
    kept = [tmp_path / "precious", tmp_path / "files" / "files" / "mine"]
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("kept")
    redis.zadd(keys.FILE_ENDS, {file_id: 1})

    work(server, tmp_path)

    assert [path.exists() for path in kept] == [True, True]
    assert redis.zcard(keys.FILE_ENDS) == 0


def test_job_of_another_class_is_read_as_ours(redis: Redis, queue: Queue) -> None:
    queue.enqueue_call("os.getpid", job_id="batch-x")

    assert isinstance(BatchQueue(redis).queue.fetch_job("batch-x"), CheckedJob)
    assert not isinstance(queue.fetch_job("batch-x"), CheckedJob)
    assert issubclass(CheckedJob, Job)
