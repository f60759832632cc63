"""Submits requests and reads their events: in order, without holes, each token once, one terminal event last.

Serves the API and any program that speaks token ids. What pub/sub loses is read back from the token log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from typing import cast

from redis.asyncio import Redis

from broker import keys, tasks
from broker.client.handle import SILENCE_S, Handle, Progression
from broker.client.replies import Inbox, ReplyHub
from broker.connection.connect import CONNECTIONS_MAX, answered_within, connect, translated
from broker.connection.entrance import check_server
from broker.errors import BrokerUnavailableError
from broker.outage import TICK_S, OutageWatch
from broker.registry import Registry
from broker.scripts import (
    DEFAULT_BOUNDS,
    Accepted,
    Bounds,
    CancelOutcome,
    Idempotency,
    Quota,
    Registration,
    Scripts,
    Submission,
)
from broker.wire import (
    WIRE_VERSION,
    Cause,
    Failed,
    Finished,
    Request,
    Ticket,
    decode_events,
    decode_logprob,
    new_id,
)

logger = logging.getLogger(__name__)

ATTACHED_POLL_S = 0.25
"""How often the log is read of a request whose messages go to another listener."""
BEAT_S = 0.2
"""Often enough for a lease of a second: whoever is late by a whole lease loses its requests."""
IDLE_BEAT_S = 0.4
"""While nothing is open there are no requests to lose; still twice within a lease of a second."""
BEAT_WITHIN_S = 1.0
"""A heartbeat that takes longer is tried again over another connection. By then a Redis that answers nobody has been
noticed."""
UNLIMITED = Quota()


class Client:
    """One per process: a command client, a reply subscription and a heartbeat under one incarnation id."""

    def __init__(self, commands: Redis, subscriber: Redis, *, bounds: Bounds, silence_s: float, pulse: Redis) -> None:
        self.id = new_id("api")
        self.commands = commands
        self.scripts = Scripts(commands)
        self.registry = Registry(commands)
        self._subscriber = subscriber
        self._pulse = pulse
        # A burst of requests must not make its process look dead.
        self._heart_scripts = self.scripts if pulse is commands else Scripts(pulse)
        self._bounds = bounds
        self._silence_s = silence_s
        self._hub = ReplyHub(subscriber, keys.reply(self.id), on_restored=self.cancel_orphans)
        self._orphans: set[str] = set()
        self._silence = OutageWatch()
        self._heart: asyncio.Task[None] | None = None
        self._ear: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        bounds: Bounds = DEFAULT_BOUNDS,
        silence_s: float = SILENCE_S,
        connections: int = CONNECTIONS_MAX,
    ) -> Client:
        """Connect, subscribe and register.

        Raises:
            BrokerUnavailableError: Redis does not answer.
            BrokerConfigError: Redis may lose accepted requests.
        """
        commands = connect(url, connections=connections)
        try:
            await check_server(commands)
        except BaseException:
            await commands.aclose()
            raise
        pulse = connect(url, connections=1)
        blocking = connect(url, blocking=True)
        return await cls.over(commands, blocking, bounds=bounds, silence_s=silence_s, pulse=pulse)

    @classmethod
    async def over(
        cls,
        commands: Redis,
        subscriber: Redis,
        *,
        bounds: Bounds = DEFAULT_BOUNDS,
        silence_s: float = SILENCE_S,
        pulse: Redis | None = None,
    ) -> Client:
        """Like `open`, over clients that exist; they are closed with it. Heartbeats go over `pulse`, if given."""
        client = cls(commands, subscriber, bounds=bounds, silence_s=silence_s, pulse=pulse or commands)
        try:
            await client._register()
            await client._hub.start()
        except TimeoutError as error:
            await client._close_connections()
            raise BrokerUnavailableError("Redis did not confirm the reply subscription") from error
        except BaseException:
            await client._close_connections()
            raise
        client._heart = asyncio.create_task(client._beat_for_ever(), name="api-heartbeat")
        client._ear = asyncio.create_task(client._note_silence(), name="api-silence")
        return client

    @property
    def is_connected(self) -> bool:
        """Whether the reply subscription stands and Redis answers."""
        return self._hub.is_connected and not self._silence.is_silent

    def while_answering(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Ends what is done in it when Redis falls silent, with `BrokerUnavailableError`."""
        return self._silence.guard()

    @property
    def open_requests(self) -> int:
        return self._hub.open_inboxes

    async def close(self) -> None:
        """Stop listening and go off the registry; requests in flight run on."""
        await tasks.end(*(task for task in (self._heart, self._ear) if task is not None))
        await self._hub.close()
        with contextlib.suppress(BrokerUnavailableError):
            await self.scripts.retire(self.id)
        await self._close_connections()

    async def submit(
        self,
        request: Request,
        ticket: Ticket,
        *,
        seed: int | None = None,
        timeout_ms: int = 3_600_000,
        retain_ms: int = 600_000,
        quota: Quota = UNLIMITED,
        idempotency: Idempotency | None = None,
    ) -> Handle:
        """Accept a request and listen to it; the same request twice is accepted once.

        Where the idempotency key is known, the handle is that of the older request, from its first token on.

        Raises:
            RefusedError: a bound is reached, or the id or key is taken by another request.
            BrokerUnavailableError: Redis cannot take it now.
        """
        reply = keys.reply(self.id)
        submission = Submission(request, ticket, seed, reply, timeout_ms, retain_ms, quota, idempotency)
        inbox = self._hub.open(request.id)
        try:
            with self._silence.asking():
                accepted = await self.scripts.accept(submission, self._bounds)
        except BaseException as error:
            self._hub.drop(request.id)
            # It may have been accepted all the same. Whoever can ask for it again under its id or key will: that must
            # not be cancelled under them.
            is_nobodys = ticket.priority == "interactive" and idempotency is None
            if is_nobodys and isinstance(error, BrokerUnavailableError | asyncio.CancelledError):
                self._orphans.add(request.id)
            raise
        has_logprobs = request.top_logprobs is not None
        if accepted.request_id != request.id:
            self._hub.drop(request.id)
            return Handle(self, accepted, Inbox(), silence_s=ATTACHED_POLL_S, has_logprobs=has_logprobs)
        # Accepted before, it may tell another listener, one that is gone: then the log must be read.
        silence_s = self._silence_s if accepted.is_new else ATTACHED_POLL_S
        due_s = asyncio.get_running_loop().time() + timeout_ms / 1000 if accepted.is_new else None
        return Handle(self, accepted, inbox, silence_s=silence_s, has_logprobs=has_logprobs, due_s=due_s)

    async def enqueue(
        self,
        request: Request,
        ticket: Ticket,
        *,
        seed: int | None = None,
        timeout_ms: int = 3_600_000,
        retain_ms: int = 600_000,
        quota: Quota = UNLIMITED,
        idempotency: Idempotency | None = None,
    ) -> Accepted:
        """Accept a request that nobody listens to; its record can be read until `retain_ms` after its end.

        Raises:
            RefusedError: a bound is reached, or the id or key is taken by another request.
            BrokerUnavailableError: Redis cannot take it now.
        """
        submission = Submission(request, ticket, seed, "", timeout_ms, retain_ms, quota, idempotency)
        return await self.scripts.accept(submission, self._bounds)

    def attach(self, request_id: str, *, has_logprobs: bool = False) -> Handle:
        """A handle of a request that somebody else submitted, from its first token on; it reads the log by itself."""
        accepted = Accepted(0, is_new=False, request_id=request_id)
        return Handle(self, accepted, Inbox(), silence_s=ATTACHED_POLL_S, has_logprobs=has_logprobs)

    async def cancel(self, request_id: str, cause: Cause) -> CancelOutcome:
        """Ask for the end of a request; the first cause is the one recorded."""
        return await self.scripts.cancel(request_id, cause)

    async def read(self, request_id: str, position: int = 0) -> Progression:
        """State, and log from `position` on, in one transaction."""
        with translated():
            pipe = self.commands.pipeline(transaction=True)
            pipe.hmget(keys.state(request_id), "status", "end")
            pipe.getrange(keys.log(request_id), position * 4, -1)
            pipe.lrange(keys.logprobs(request_id), position, -1)
            (status, end), tokens, logprobs = await pipe.execute()
        return Progression(
            status=None if status is None else status.decode(),
            end=None if end is None else cast("Finished | Failed", decode_events(end)[0]),
            tokens=tokens,
            logprobs=[decode_logprob(blob) for blob in logprobs],
        )

    def forget(self, request_id: str) -> None:
        """Stop listening to a request."""
        self._hub.drop(request_id)

    async def abandon(self, request_id: str, cause: Cause) -> None:
        """Cancel and forget; if Redis is away, the cancellation is sent when it is back."""
        self.forget(request_id)
        try:
            await self.cancel(request_id, cause)
        except BrokerUnavailableError:
            self._orphans.add(request_id)

    async def cancel_orphans(self) -> None:
        """Cancel what may have been accepted or left without this process hearing of it."""
        for request_id in list(self._orphans):
            with contextlib.suppress(BrokerUnavailableError):
                await self.cancel(request_id, "listener")
                self._orphans.discard(request_id)

    async def _register(self) -> None:
        fields: dict[str, str | int | bytes] = {"kind": "api", "host": socket.gethostname()}
        fields |= {"pid": os.getpid(), "wire": WIRE_VERSION}
        await self.scripts.register(Registration(self.id, fields))

    async def _beat_for_ever(self) -> None:
        """Through trouble of every kind: without heartbeats this process would be dead to all others."""
        troubles: set[str] = set()
        while True:
            await asyncio.sleep(BEAT_S if self.open_requests else IDLE_BEAT_S)
            try:
                async with answered_within(BEAT_WITHIN_S):
                    await self.beat()
                troubles.clear()
            except Exception as error:
                kind = type(error).__name__
                if kind not in troubles:
                    why = None if isinstance(error, BrokerUnavailableError) else error
                    logger.warning("heartbeat not sent: %s", error, exc_info=why, extra={"api": self.id})
                troubles.add(kind)

    async def _note_silence(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._silence.wait_for_question()
            looked_s = loop.time()
            await asyncio.sleep(TICK_S)
            self._silence.tick(loop.time() - looked_s)

    async def beat(self) -> None:
        """Say that this process lives; register anew if it was declared dead."""
        with self._silence.asking():
            is_known = await self._heart_scripts.beat(self.id, {"open": self.open_requests})
        if not is_known:
            logger.warning("this process was declared dead; it registers anew", extra={"api": self.id})
            await self.scripts.retire(self.id)
            await self._register()
        if self._orphans and self.is_connected:
            await self.cancel_orphans()

    async def _close_connections(self) -> None:
        await self._hub.close()
        await self.commands.aclose()
        await self._subscriber.aclose()
        await self._pulse.aclose()
