"""Requests to a lane that plays a script, and what a client must see of each: strict, token by token."""

from __future__ import annotations

from dataclasses import dataclass

from broker.client.handle import Handle, tokens_of
from broker.wire import Failed, Finished, Request, Sampling, Ticket, Tokens, new_id, pack_tokens
from mtplx_core.engine import Row
from mtplx_core.engines.scripted import Script, scripted_completion
from workers.config import ScriptConfig
from workers.scripted_lane import IDENTITY, encode_text, script_of

PROFILE = "balanced"
SCRIPT = script_of(ScriptConfig())


@dataclass(frozen=True, slots=True)
class Ask:
    """One request and the completion it must get."""

    request: Request
    ticket: Ticket
    expected: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Heard:
    """What a client heard of one request."""

    tokens: tuple[int, ...]
    end: Finished | Failed


def ask(text: str, max_tokens: int, *, priority: str = "interactive", script: Script = SCRIPT) -> Ask:
    """A request for a scripted completion."""
    prompt = encode_text(text)
    request_id = new_id("req")
    request = Request(request_id, IDENTITY, PROFILE, pack_tokens(prompt), max_tokens, Sampling(temperature=0.0))
    ticket = Ticket(request_id, IDENTITY, PROFILE, len(prompt), max_tokens, priority)  # type: ignore[arg-type]
    return Ask(request, ticket, scripted_completion(Row("row", prompt, max_tokens), script))


async def hear(handle: Handle) -> Heard:
    """Read a request to its end; positions must follow one another without holes."""
    tokens: list[int] = []
    async for event in handle.events():
        match event:
            case Tokens():
                assert event.position == len(tokens)
                tokens += tokens_of(event)
            case Finished() | Failed():
                return Heard(tuple(tokens), event)
    raise AssertionError("the events ended without an end")
