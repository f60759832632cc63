"""What has become of a request, as one value: its tokens and its end, waited for or read from its record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from broker.client.client import Client
from broker.client.handle import Handle, tokens_of
from broker.errors import UnknownRequestError
from broker.wire import TERMINAL, Failed, Finished, Logprob, Tokens, unpack_tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request as it stands."""

    request_id: str
    tokens: tuple[int, ...]
    """Committed so far, all of them once it is over."""
    end: Finished | Failed | None
    """None while it waits or runs."""
    logprobs: Sequence[Logprob] = ()

    @property
    def is_over(self) -> bool:
        return self.end is not None


async def wait(handle: Handle) -> Outcome:
    """Read a request to its end."""
    tokens: list[int] = []
    logprobs: list[Logprob] = []
    async for event in handle.events():
        match event:
            case Tokens():
                tokens += tokens_of(event)
                logprobs += event.logprobs or ()
            case Finished() | Failed():
                return Outcome(handle.request_id, tuple(tokens), event, logprobs)
    raise AssertionError("events ended without an end")


async def look(client: Client, request_id: str) -> Outcome:
    """The record of a request, without waiting and without having listened.

    Raises:
        UnknownRequestError: there is no such request, or its record has expired.
        BrokerUnavailableError: Redis cannot be read now.
    """
    found = await client.read(request_id)
    if found.status is None:
        raise UnknownRequestError(f"no request {request_id}, or its record has expired")
    end = found.end
    if end is None and found.status in TERMINAL:
        end = Failed(request_id, "lost", "the request ended without a record of how")
    return Outcome(request_id, unpack_tokens(found.tokens), end, found.logprobs)
