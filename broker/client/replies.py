"""One subscription per process: hands the events that arrive on its reply channel to the requests that wait.

Pub/sub may lose messages and never says so. An inbox therefore carries a `must_repair` flag, raised whenever
something may have been missed; whoever reads the inbox then goes to the state and the token log.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from broker import tasks
from broker.connection.connect import translated
from broker.errors import BrokerError, WireError
from broker.wire import Event, decode_events

logger = logging.getLogger(__name__)

INBOX_EVENTS = 1024
RECONNECT_MIN_S, RECONNECT_MAX_S = 0.05, 1.0


class Inbox:
    """Events of one request, bounded: a full inbox is emptied and repaired from the log."""

    def __init__(self, capacity: int = INBOX_EVENTS) -> None:
        self._events: deque[Event] = deque()
        self._capacity = capacity
        self._filled = asyncio.Event()
        self._must_repair = False

    def put(self, event: Event) -> None:
        if len(self._events) >= self._capacity:
            self.demand_repair()
            return
        self._events.append(event)
        self._filled.set()

    def demand_repair(self) -> None:
        """Whatever is queued is dropped: the log has it."""
        self._events.clear()
        self._must_repair = True
        self._filled.set()

    async def get(self, timeout_s: float) -> Event | None:
        """The next event; None when the reader must repair, because of silence or of a possible loss."""
        if not self._filled.is_set():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._filled.wait()
            except TimeoutError:
                return None
        if self._must_repair:
            self._must_repair = False
            self._clear_if_empty()
            return None
        event = self._events.popleft()
        self._clear_if_empty()
        return event

    def _clear_if_empty(self) -> None:
        if not self._events and not self._must_repair:
            self._filled.clear()


class ReplyHub:
    """Owns the subscription to one reply channel; `start` returns once Redis has confirmed it."""

    def __init__(self, client: Redis, channel: str, *, on_restored: Callable[[], Awaitable[None]]) -> None:
        """`client` is a blocking client that nobody else uses; `on_restored` runs after every re-subscription."""
        self._client = client
        self._channel = channel
        self._on_restored = on_restored
        self._inboxes: dict[str, Inbox] = {}
        self._task: asyncio.Task[None] | None = None
        self._confirmed = asyncio.Event()

    @property
    def is_connected(self) -> bool:
        return self._confirmed.is_set()

    @property
    def open_inboxes(self) -> int:
        return len(self._inboxes)

    async def start(self) -> None:
        """Raises: TimeoutError when Redis does not confirm within five seconds."""
        self._task = asyncio.create_task(self._run(), name="reply-hub")
        try:
            async with asyncio.timeout(5.0):
                await self._confirmed.wait()
        except TimeoutError:
            await self.close()
            raise

    async def close(self) -> None:
        if self._task is None:
            return
        await tasks.end(self._task)
        self._task = None

    def open(self, request_id: str) -> Inbox:
        """An inbox for a request; open it before the request can produce events."""
        inbox = self._inboxes.setdefault(request_id, Inbox())
        return inbox

    def drop(self, request_id: str) -> None:
        self._inboxes.pop(request_id, None)

    def dispatch(self, message: bytes) -> None:
        """Hand one reply message to the inboxes it speaks of."""
        try:
            events = decode_events(message)
        except WireError:
            logger.error("a reply message could not be read; every waiting request is repaired from its log")
            self._repair_all()
            return
        for event in events:
            inbox = self._inboxes.get(event.id)
            if inbox is not None:
                inbox.put(event)

    def _repair_all(self) -> None:
        for inbox in self._inboxes.values():
            inbox.demand_repair()

    async def _run(self) -> None:
        delay_s = RECONNECT_MIN_S
        while True:
            try:
                with translated():
                    await self._listen()
            except (BrokerError, RedisError) as error:
                if self._confirmed.is_set():
                    logger.warning("the reply subscription broke: %s", error)
                    delay_s = RECONNECT_MIN_S
                self._confirmed.clear()
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, RECONNECT_MAX_S)

    async def _listen(self) -> None:
        was_confirmed_before = False
        async with self._client.pubsub() as pubsub:
            await cast("Any", pubsub.subscribe(self._channel))
            async for message in pubsub.listen():
                if message["type"] == "subscribe":
                    if was_confirmed_before:
                        logger.info("the reply subscription was restored")
                    was_confirmed_before = True
                    await self._confirm()
                elif message["type"] == "message":
                    self.dispatch(message["data"])

    async def _confirm(self) -> None:
        is_first = not self._confirmed.is_set() and not self._inboxes
        self._confirmed.set()
        if not is_first:
            self._repair_all()
        await self._on_restored()
