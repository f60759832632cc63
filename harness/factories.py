"""Ready-made wire values and broker objects; every argument has a default that is good enough for most tests."""

from __future__ import annotations

from broker.former.capacity import Waiting, WorkerState
from broker.scripts import DEFAULT_BOUNDS, Registration, Submission
from broker.wire import Lane, Priority, Request, Ticket, encode, pack_tokens, seed_of

MODEL = "tiny@0a1b"
BOUNDS = DEFAULT_BOUNDS


def request(
    request_id: str = "r1", *, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 16, model: str = MODEL
) -> Request:
    return Request(id=request_id, model=model, profile="balanced", prompt=pack_tokens(prompt), max_tokens=max_tokens)


def ticket(
    request_id: str = "r1",
    *,
    model: str = MODEL,
    prompt_tokens: int = 3,
    max_tokens: int = 16,
    priority: Priority = "interactive",
    key_id: str = "",
    min_wire: int = 1,
) -> Ticket:
    return Ticket(
        id=request_id,
        model=model,
        profile="balanced",
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        priority=priority,
        key_id=key_id,
        min_wire=min_wire,
    )


def submission(
    request_id: str = "r1",
    *,
    ticket: Ticket | None = None,
    reply: str = "",
    timeout_ms: int = 3_600_000,
    retain_ms: int = 600_000,
) -> Submission:
    ticket = ticket or _ticket(request_id)
    body = request(ticket.id, prompt=(1,) * ticket.prompt_tokens, max_tokens=ticket.max_tokens, model=ticket.model)
    return Submission(body, ticket, seed_of(ticket.id), reply, timeout_ms, retain_ms)


def lane(
    *,
    model: str = MODEL,
    decode_batch_max: int = 8,
    max_context_tokens: int = 2048,
    token_budget: int = 0,
    wire: int = 1,
) -> Lane:
    return Lane(
        model=model,
        profile="balanced",
        route="scripted",
        mode="ar_batch",
        decode_batch_max=decode_batch_max,
        max_context_tokens=max_context_tokens,
        token_budget=token_budget,
        wire=wire,
    )


def registration(
    worker_id: str = "w1",
    *,
    lane: Lane | None = None,
    free_rows: int | None = None,
    free_tokens: int | None = None,
    is_accepting: bool = True,
) -> Registration:
    """A worker's registration."""
    lane = lane or _lane()
    return Registration(
        daemon_id=worker_id,
        fields={"kind": "worker", "lane": encode(lane), "accepting": int(is_accepting)},
        free_rows=lane.decode_batch_max if free_rows is None else free_rows,
        free_tokens=free_tokens,
    )


def waiting(request_id: str = "r1", *, ordinal: int = 1, ticket: Ticket | None = None, accepted_ms: int = 0) -> Waiting:
    return Waiting(ticket or _ticket(request_id), ordinal, accepted_ms)


def view(
    worker_id: str = "w1", *, lane: Lane | None = None, free_rows: int = 8, free_tokens: int | None = None
) -> WorkerState:
    return WorkerState(worker_id, lane or _lane(), free_rows, free_tokens)


_ticket = ticket
_lane = lane
