"""Batches as jobs of RQ, as JSON and without pickle, so that RQ's own tools see them. Blocks: call it from a thread."""

from __future__ import annotations

from redis import Redis
from rq import Queue, Retry
from rq.exceptions import DuplicateJobError, NoSuchJobError
from rq.job import JobStatus
from rq.serializers import JSONSerializer

from api.batch.checked_job import RUN, CheckedJob
from broker.connection.connect import COMMAND_TIMEOUT_S, CONNECT_TIMEOUT_S, reading_url, translated, try_options

QUEUE = "mtplx-batches"
RETRIES = 1000
"""A job that is taken up again goes on where it was; so only one that dies at once, over and over, is given up."""
MARGIN_S = 3600
"""A batch ends itself when its window closes; RQ's time-out is for one that does not."""
KEEP_S = 7 * 24 * 3600


def connect_blocking(url: str) -> Redis:
    """A synchronous client, which RQ needs. Raises: BrokerConfigError."""
    with reading_url(url):
        client = Redis.from_url(
            url, protocol=2, socket_connect_timeout=CONNECT_TIMEOUT_S, socket_timeout=COMMAND_TIMEOUT_S
        )
        try_options(client.connection_pool.connection_class, client.connection_pool.connection_kwargs)
        return client


class BatchQueue:
    """The one queue all batches are in."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self.queue = Queue(QUEUE, connection=client, serializer=JSONSerializer, job_class=CheckedJob)

    def enqueue(self, batch_id: str, *, window_s: int) -> None:
        """Have a batch run; a batch that is queued already stays where it is.

        Raises:
            BrokerUnavailableError: Redis cannot take it now.
        """
        with translated():
            try:
                self.queue.enqueue_call(
                    RUN,
                    args=(batch_id,),
                    job_id=batch_id,
                    timeout=window_s + MARGIN_S,
                    result_ttl=KEEP_S,
                    failure_ttl=KEEP_S,
                    retry=Retry(max=RETRIES),
                    description=f"batch {batch_id}",
                    unique=True,
                )
            except DuplicateJobError:
                return

    def status(self, batch_id: str) -> JobStatus | None:
        """What RQ thinks of a batch's job; None when it has none."""
        with translated():
            try:
                return CheckedJob.fetch(batch_id, connection=self._client, serializer=JSONSerializer).get_status()
            except NoSuchJobError:
                return None

    def close(self) -> None:
        self._client.close()
