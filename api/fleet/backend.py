"""What the API needs of the queue, as a seam, and the one real thing behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from broker.client.client import Client
from broker.registry import DaemonRecord, Load
from broker.scripts import Accepted, Idempotency, Quota
from broker.wire import Cause, Event, ModelCard, Request, Ticket


@dataclass(frozen=True, slots=True)
class Fleet:
    """Who serves what, as the registry said at one moment."""

    cards: Mapping[str, ModelCard] = field(default_factory=dict)
    """By model identity."""
    daemons: Sequence[DaemonRecord] = ()
    last_seen_ms: Mapping[str, int] = field(default_factory=dict)
    load: Load = Load({}, {}, {})
    ended: Mapping[str, int] = field(default_factory=dict)
    now_ms: int = 0
    """Redis' clock, by which `last_seen_ms` is measured."""
    silent: frozenset[str] = frozenset()
    """Daemons whose heartbeat stands still, as `api.fleet.catalog` has seen; nobody may have declared them dead."""
    has_former: bool = True
    """False once no former's heartbeat has moved for long."""

    @property
    def workers(self) -> list[DaemonRecord]:
        return [daemon for daemon in self.daemons if daemon.lane is not None and not daemon.is_dead]

    @property
    def beating_workers(self) -> list[DaemonRecord]:
        return [worker for worker in self.workers if worker.id not in self.silent]

    @property
    def formers(self) -> list[DaemonRecord]:
        """Those that beat."""
        alive = [daemon for daemon in self.daemons if daemon.kind == "former" and not daemon.is_dead]
        return [former for former in alive if former.id not in self.silent]


class RequestHandle(Protocol):
    """One accepted request; see `broker.client.client.RequestHandle`."""

    @property
    def accepted(self) -> Accepted: ...

    def events(self) -> AsyncIterator[Event]: ...

    async def abandon(self, cause: Cause = "client") -> None: ...

    def leave(self) -> None:
        """Stop listening; the request goes on."""


class Backend(Protocol):
    """The queue as seen from here."""

    @property
    def is_connected(self) -> bool: ...

    def while_answering(self) -> AbstractAsyncContextManager[None]:
        """Ends what is done in it when the queue falls silent. Raises: BrokerUnavailableError."""

    async def submit(
        self,
        request: Request,
        ticket: Ticket,
        *,
        seed: int | None,
        timeout_ms: int,
        retain_ms: int,
        quota: Quota,
        idempotency: Idempotency | None = None,
    ) -> RequestHandle:
        """Raises: RefusedError, BrokerUnavailableError."""

    async def keep(self, request_id: str, for_ms: int) -> None:
        """Somebody waits for a request that outlives its listeners. Raises: BrokerUnavailableError."""

    async def cancel_unwanted(self, request_id: str) -> None:
        """End it, if nobody does. Raises: BrokerUnavailableError."""

    async def fleet(self) -> Fleet:
        """Raises: BrokerUnavailableError."""

    async def tokenizer_files(self, digest: str) -> dict[str, bytes]:
        """Raises: BrokerUnavailableError."""

    async def close(self) -> None: ...


class RedisBackend:
    """The broker room's client and registry behind the seam."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @property
    def is_connected(self) -> bool:
        return self._client.is_connected

    def while_answering(self) -> AbstractAsyncContextManager[None]:
        return self._client.while_answering()

    async def submit(
        self,
        request: Request,
        ticket: Ticket,
        *,
        seed: int | None,
        timeout_ms: int,
        retain_ms: int,
        quota: Quota,
        idempotency: Idempotency | None = None,
    ) -> RequestHandle:
        return await self._client.submit(
            request,
            ticket,
            seed=seed,
            timeout_ms=timeout_ms,
            retain_ms=retain_ms,
            quota=quota,
            idempotency=idempotency,
        )

    async def keep(self, request_id: str, for_ms: int) -> None:
        await self._client.scripts.keep(request_id, for_ms)

    async def cancel_unwanted(self, request_id: str) -> None:
        await self._client.scripts.cancel(request_id, "listener", if_unwanted=True)

    async def fleet(self) -> Fleet:
        registry = self._client.registry
        cards, daemons, last_seen_ms, load, ended, now_ms = await asyncio.gather(
            registry.cards(),
            registry.daemons(),
            registry.last_seen_ms(),
            registry.load(),
            registry.ended(),
            registry.now_ms(),
        )
        return Fleet(cards, daemons, last_seen_ms, load, ended, now_ms)

    async def tokenizer_files(self, digest: str) -> dict[str, bytes]:
        return await self._client.registry.tokenizer_files(digest)

    async def close(self) -> None:
        await self._client.close()
