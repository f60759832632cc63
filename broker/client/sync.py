"""The client for programs without an event loop: the same calls, blocking. Token ids in, token ids out.

with SyncClient.open("redis://localhost") as client:
    handle = client.submit(request, ticket)
    outcome = handle.wait()
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

from broker.client import results as outcomes
from broker.client.client import Client
from broker.client.handle import Handle
from broker.client.loop_thread import LoopThread
from broker.client.results import Outcome
from broker.scripts import DEFAULT_BOUNDS, Accepted, Bounds, CancelOutcome
from broker.wire import Cause, Event, Request, Ticket


class SyncClient:
    """One per process is enough; it may be used from several threads."""

    def __init__(self, client: Client, loop: LoopThread) -> None:
        self._client = client
        self._loop = loop

    @classmethod
    def open(cls, url: str, *, bounds: Bounds = DEFAULT_BOUNDS) -> SyncClient:
        """Raises: BrokerUnavailableError."""
        loop = LoopThread("mtplx-client")
        try:
            return cls(loop.run(Client.open(url, bounds=bounds)), loop)
        except BaseException:
            loop.close()
            raise

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening; requests in flight run on."""
        self._loop.run(self._client.close())
        self._loop.close()

    def submit(self, request: Request, ticket: Ticket, **options: Any) -> SyncHandle:
        """As `Client.submit`, with its options. Raises: RefusedError, BrokerUnavailableError."""
        return SyncHandle(self._loop.run(self._client.submit(request, ticket, **options)), self._loop)

    def enqueue(self, request: Request, ticket: Ticket, **options: Any) -> Accepted:
        """As `Client.enqueue`, with its options. Raises: RefusedError, BrokerUnavailableError."""
        return self._loop.run(self._client.enqueue(request, ticket, **options))

    def attach(self, request_id: str) -> SyncHandle:
        """A handle of a request that was submitted before, from its first token on."""
        return SyncHandle(self._client.attach(request_id), self._loop)

    def look(self, request_id: str) -> Outcome:
        """The record of a request, without waiting. Raises: UnknownRequestError, BrokerUnavailableError."""
        return self._loop.run(outcomes.look(self._client, request_id))

    def cancel(self, request_id: str, cause: Cause = "client") -> CancelOutcome:
        return self._loop.run(self._client.cancel(request_id, cause))


class SyncHandle:
    """One request, for one reader."""

    def __init__(self, handle: Handle, loop: LoopThread) -> None:
        self._handle = handle
        self._loop = loop

    @property
    def request_id(self) -> str:
        return self._handle.request_id

    @property
    def accepted(self) -> Accepted:
        return self._handle.accepted

    def events(self) -> Iterator[Event]:
        """Tokens and progress as they come, one `Finished` or `Failed` last."""
        return self._loop.iterate(self._handle.events())

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """Read to the end. Raises: TimeoutError; the request runs on then."""
        return self._loop.run(outcomes.wait(self._handle), timeout_s=timeout_s)

    def cancel(self, cause: Cause = "client") -> CancelOutcome:
        return self._loop.run(self._handle.cancel(cause))
