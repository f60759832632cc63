"""The RQ job of a batch, which runs one function of this project and nothing else that a job in Redis may name.

RQ imports and calls what a job's record says: its function, its callbacks, its webhooks. Redis' password is on every
machine that joins, so here the record chooses only which batch is run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from rq.exceptions import DeserializationError, NoSuchJobError
from rq.job import Job
from rq.utils import import_attribute

RUN = "api.batch.jobs.run_batch"
OLD_RUN = "api.batch_jobs.run_batch"
"""The name of `RUN` in jobs that version 0.1 queued. To be removed with the release after the next."""


class ForeignJobError(Exception):
    """A job asks for something else than that a batch be run."""


class CheckedJob(Job):
    """A job whose function is `RUN` with the job's own id, without callbacks and webhooks."""

    @property
    def is_ours(self) -> bool:
        """Whether its record asks for `RUN`, under either name, for the batch that the job is named after."""
        try:
            call = (self.func_name, self.instance, self.args, self.kwargs)
        except DeserializationError:
            return False
        return call in [(name, None, [self.id], {}) for name in (RUN, OLD_RUN)]

    @property
    def func(self) -> Callable[..., Any]:
        """Raises: ForeignJobError."""
        if not self.is_ours:
            raise ForeignJobError(f"job {self.id} is none of a batch")
        return import_attribute(RUN)

    @property
    def success_callback(self) -> None:
        return None

    @property
    def failure_callback(self) -> None:
        return None

    @property
    def stopped_callback(self) -> None:
        return None

    @property
    def should_retry(self) -> bool:
        return self.is_ours and super().should_retry

    def send_webhooks(self, status: str, *, exc_string: str | None = None) -> None:
        """Ask no address that a record names."""

    def restore(self, raw_data: Any) -> Any:
        """Raises: NoSuchJobError when the record cannot be read, so that RQ passes over it."""
        try:
            return cast("Any", super()).restore(raw_data)
        except NoSuchJobError:
            raise
        except Exception as error:  # RQ parses numbers, dates and JSON of the record without a check
            raise NoSuchJobError(f"the record of job {self.id} cannot be read: {error}") from error
