"""The batch worker: an RQ worker that runs batches in its own process, one at a time, and keeps the list of them tidy.

It does not fork: whatever kills the process ends its batch with it, so that nothing runs on behind RQ's back, and on
macOS a fork of a threaded process is not safe.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from redis import Redis
from redis.client import Pipeline
from redis.exceptions import RedisError
from rq import SimpleWorker, worker_registration
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from api.batch.checked_job import CheckedJob, ForeignJobError
from api.batch.file_store import FileStore, content_path
from api.batch.jobs import CURRENT, JobContext
from api.batch.queue import BatchQueue, connect_blocking
from api.batch.runner import RunnerLimits
from api.openai.batch_schemas import BatchError, window_s
from broker.batches import BatchDesk, BatchRecord
from broker.connection.connect import connect, translated
from broker.connection.entrance import enter
from broker.errors import BrokerUnavailableError

logger = logging.getLogger(__name__)

LOOK_S = 15
"""RQ looks for work at least so often, and tidies up no later."""
DEQUEUE_MARGIN_S = 15
"""RQ waits so much shorter than its worker's time to live."""
ORPHAN_S = 30
"""A batch that is older and has no job lost it on the way."""
AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class BatchWorkerConfig:
    """How one batch worker works."""

    redis_url: str
    files_url: str
    batch_in_flight: int = 128
    batch_lease_s: float = 30.0
    batch_lines_max: int = 50_000
    body_limit_bytes: int = 10 * 1024 * 1024

    @property
    def limits(self) -> RunnerLimits:
        return RunnerLimits(
            in_flight=self.batch_in_flight,
            lease_s=self.batch_lease_s,
            most_lines=self.batch_lines_max,
            most_line_bytes=self.body_limit_bytes,
        )


def run_batch_worker(config: BatchWorkerConfig, *, is_burst: bool = False) -> None:
    """Run batches until SIGTERM or SIGINT; a batch that runs then is taken up again by the next worker.

    Args:
        is_burst: end when nothing is queued.

    Raises:
        ApiConfigError: the place for files is none.
        BrokerConfigError: see `broker.connection.entrance.enter`.
    """
    store = FileStore(config.files_url)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    client = connect_blocking(config.redis_url)
    try:
        _work(client, config, store, is_burst=is_burst)
    finally:
        client.close()
        for number, handler in before.items():  # RQ sets its own and leaves them
            signal.signal(number, handler)


def _work(client: Redis, config: BatchWorkerConfig, store: FileStore, *, is_burst: bool) -> None:
    pause, is_start = threading.Event(), True
    while asyncio.run(enter(config.redis_url, who="the batch worker", is_start=is_start)):
        is_start = False
        worker = BatchWorker(BatchQueue(client), client, config, store)
        try:
            with translated():
                worker.work(burst=is_burst, logging_level="WARNING")
        except BrokerUnavailableError as error:
            logger.warning("the batch worker waits: %s", error)
        if worker.was_told_to_stop or is_burst:
            return
        pause.wait(AGAIN_S)  # RQ's loop has ended over an outage of Redis


class BatchWorker(SimpleWorker):
    """RQ's worker with a heartbeat while its job runs, and a job that can be stopped."""

    def __init__(self, queue: BatchQueue, client: Redis, config: BatchWorkerConfig, store: FileStore) -> None:
        super().__init__(
            [queue.queue],
            connection=client,
            serializer=JSONSerializer,
            job_class=CheckedJob,
            # RQ would ask CLIENT INFO for its address, whose reply cannot be read where a socket's path has a space.
            prepare_for_work=False,
            worker_ttl=LOOK_S + DEQUEUE_MARGIN_S if config.batch_lease_s >= LOOK_S else DEQUEUE_MARGIN_S + 1,
            maintenance_interval=min(LOOK_S, max(1, int(config.batch_lease_s))),
        )
        self.hostname, self.pid = socket.gethostname(), os.getpid()
        self._batch_queue = queue
        self._config = config
        self._store = store
        self._stop_run: Callable[[], None] | None = None
        self.was_told_to_stop = False

    def perform_job(self, job: Job, queue: Any, execution: Any) -> bool:
        context = JobContext(self._config.redis_url, self._store, self._config.limits, self._take_stop)
        token = CURRENT.set(context)
        done = threading.Event()
        beats = threading.Thread(target=self._beat, args=(job, execution, done), name="rq-heartbeat", daemon=True)
        beats.start()
        try:
            return bool(super().perform_job(job, queue, execution))
        finally:
            self._stop_run = None
            CURRENT.reset(token)
            done.set()
            beats.join()

    def get_heartbeat_ttl(self, job: Job, working_time: float = 0.0) -> int:
        """How long after its last beat RQ takes the job for abandoned."""
        return max(2, int(self._config.batch_lease_s))

    def handle_warm_shutdown_request(self) -> None:
        self.was_told_to_stop = True
        if self._stop_run is not None:
            self._stop_run()

    def heartbeat(self, timeout: int | None = None, pipeline: Pipeline | None = None) -> None:
        """Also registers again, in case Redis or another worker's clean-up has lost this one."""
        super().heartbeat(timeout, pipeline)
        worker_registration.register(self, pipeline)
        # In a pipeline RQ itself looks whether the record was there.
        if pipeline is None and not self.connection.hexists(self.key, "birth"):
            self.connection.hset(self.key, mapping={**self.serialize(), "state": self.get_state()})

    def handle_exception(self, job: Job, *exc_info: Any) -> None:
        if isinstance(exc_info[1], ForeignJobError):
            logger.error("refused to run what lies in the queue of batches: %s", exc_info[1])
            return
        super().handle_exception(job, *exc_info)

    def run_maintenance_tasks(self) -> None:
        super().run_maintenance_tasks()  # type: ignore[no-untyped-call]  # rq annotates in part
        try:
            asyncio.run(tidy_up(self._config.redis_url, self._batch_queue, self._store))
        except BrokerUnavailableError as error:
            logger.debug("not tidied up: %s", error)

    def _take_stop(self, stop: Callable[[], None]) -> None:
        self._stop_run = stop
        if self.was_told_to_stop:
            stop()

    def _beat(self, job: Job, execution: Any, done: threading.Event) -> None:
        while not done.wait(self._config.batch_lease_s / 4):
            try:
                self.maintain_heartbeats(job, execution)
            except RedisError as error:
                logger.debug("heartbeat not sent: %s", error)


async def tidy_up(redis_url: str, queue: BatchQueue, store: FileStore) -> None:
    """Queue batches that lost their job, fail those whose job RQ gave up, remove the contents of expired files.

    Raises:
        BrokerUnavailableError: Redis cannot be used now.
    """
    client = connect(redis_url)
    try:
        desk = BatchDesk(client)
        now_s = await desk.now_ms() // 1000
        for record in await desk.open_batches():
            await _see_to(record, desk, queue, now_s=now_s)
        for file_id in await desk.ended_files():
            await asyncio.to_thread(store.delete, content_path(file_id))
            await desk.forget_ended_file(file_id)
    finally:
        await client.aclose()


async def _see_to(record: BatchRecord, desk: BatchDesk, queue: BatchQueue, *, now_s: int) -> None:
    status = await asyncio.to_thread(queue.status, record.id)
    if status is None and now_s - record.created_at > ORPHAN_S:
        logger.warning("batch %s has no job; it gets one", record.id)
        await asyncio.to_thread(queue.enqueue, record.id, window_s=window_s(record.completion_window))
    elif status in (JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED):
        logger.error("batch %s failed: its job was given up", record.id)
        error = BatchError("job_failed", "The batch's job failed too often; the batch worker's log says why.")
        await desk.move(
            record.id,
            "failed",
            come_from=["validating", "in_progress", "finalizing", "cancelling"],
            fields={"errors": msgspec.json.encode([error]).decode()},
        )
