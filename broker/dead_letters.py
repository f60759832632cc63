"""The dead letters: requests that were given up on and entries nobody could read. Listed, tried again, dropped.

A letter that is tried again becomes a new request under a new id; the old one has ended and stays so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from msgspec import structs
from redis.asyncio import Redis

from broker import keys
from broker.connection.connect import translated
from broker.errors import UnknownRequestError, WireError
from broker.scripts import DEFAULT_BOUNDS, Scripts, Submission
from broker.wire import Request, Ticket, decode_request, decode_ticket, new_id


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One of them."""

    id: str
    """Its place in the stream, `milliseconds-number`."""
    why: str
    request_id: str
    fields: Mapping[bytes, bytes]

    @property
    def at_ms(self) -> int:
        """When it was given up, by Redis' clock."""
        return int(self.id.partition("-")[0])

    def request(self) -> tuple[Request, Ticket]:
        """Raises: WireError when it does not hold a whole request."""
        if b"body" not in self.fields or b"ticket" not in self.fields:
            raise WireError(f"dead letter {self.id} holds no whole request")
        return decode_request(self.fields[b"body"]), decode_ticket(self.fields[b"ticket"])


class DeadLetters:
    """All of them, over a command client."""

    def __init__(self, client: Redis) -> None:
        self._client = client

    async def all(self, *, most: int = 1000) -> list[DeadLetter]:
        """The newest, newest first."""
        with translated():
            entries = await cast("Any", self._client.xrevrange(keys.DEAD_LETTERS, count=most))
        return [_letter(entry_id.decode(), fields) for entry_id, fields in entries]

    async def find(self, name: str) -> DeadLetter:
        """By its own id or that of its request.

        Raises:
            UnknownRequestError: there is none.
        """
        for letter in await self.all(most=100_000):
            if name in (letter.id, letter.request_id):
                return letter
        raise UnknownRequestError(f"no dead letter {name}")

    async def requeue(self, letter: DeadLetter) -> str:
        """Accept its request anew; the id it has now.

        Raises:
            WireError: it does not hold a whole request.
            RefusedError: the queue does not take it now.
        """
        request, ticket = letter.request()
        request_id = new_id("again")
        submission = Submission(
            structs.replace(request, id=request_id), structs.replace(ticket, id=request_id, priority="offline")
        )
        await Scripts(self._client).accept(submission, DEFAULT_BOUNDS)
        await self.drop(letter)
        return request_id

    async def drop(self, letter: DeadLetter) -> None:
        with translated():
            await self._client.xdel(keys.DEAD_LETTERS, letter.id)


def _letter(entry_id: str, fields: Mapping[bytes, bytes]) -> DeadLetter:
    return DeadLetter(
        id=entry_id,
        why=fields.get(b"why", b"").decode("utf-8", "replace"),
        request_id=fields.get(b"id", b"").decode("utf-8", "replace"),
        fields=fields,
    )
