"""Typed wrappers of every Lua script; nobody else runs one. Each is safe to run twice."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import islice
from typing import Any, Literal, NamedTuple, cast

from redis.asyncio import Redis

from broker import keys
from broker.connection import translated
from broker.errors import ConflictError, QueueFullError
from broker.wire import Cause, Failed, Finished, Request, Seat, Status, Ticket, encode, encode_events

RECORD_TTL_MS = 14 * 24 * 3600 * 1000
"""A daemon's record outlives any outage; death is decided by the watcher, never by this."""
TOKENIZER_TTL_MS = 7 * 24 * 3600 * 1000
DEAD_LETTERS_KEPT = 10_000
_BURIED_FIELDS = 64
"""More fields than any entry of ours has; Lua cannot pass on an unbounded number."""

_NAMES = ["accept", "form", "commit", "finish", "hand_back", "cancel", "register", "beat", "retire", "bury", "lease"]


class Bounds(NamedTuple):
    """How much of one priority may be accepted and not yet ended."""

    requests: int = 10_000
    tokens: int = 50_000_000


DEFAULT_BOUNDS = Bounds()


class Accepted(NamedTuple):
    ordinal: int
    is_new: bool
    """False when the same request had been accepted before."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A request with everything ACCEPT writes about it."""

    request: Request
    ticket: Ticket
    seed: int
    reply: str = ""
    """Reply channel of the listener; empty when nobody listens."""
    timeout_ms: int = 3_600_000
    retain_ms: int = 600_000


@dataclass(frozen=True, slots=True)
class RowCommit:
    """Tokens of one row for COMMIT; none while it is in prefill."""

    seat: Seat
    position: int
    tokens: bytes = b""
    logprobs: Sequence[bytes] = ()


class Refusal(NamedTuple):
    """Why COMMIT took none of the rows: this one."""

    request_id: str
    why: Literal["lost", "short", "diverged"]
    length: int
    """Tokens the log holds."""


@dataclass(frozen=True, slots=True)
class CommitResult:
    refused: tuple[Refusal, ...] = ()
    """If any, nothing was written."""
    wanted_ends: Mapping[str, Cause] = field(default_factory=dict)
    """Rows that somebody wants ended, with the cause."""


@dataclass(frozen=True, slots=True)
class RowFinish:
    """The end of one row for FINISH."""

    seat: Seat
    length: int
    """Tokens the log must hold; -1: any."""
    status: Status
    cause: str
    event: Finished | Failed


class FinishResult(NamedTuple):
    outcome: Literal["ok", "again", "lost", "short"]
    length: int = 0


HandBackOutcome = Literal["waiting", "ended", "dead", "lost"]
CancelOutcome = Literal["unknown", "ended", "cancelled", "pending"]


class Scripts:
    """All scripts, bound to one command client."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._scripts = {name: client.register_script(source(name)) for name in _NAMES}

    async def accept(self, submission: Submission, bounds: Bounds) -> Accepted:
        """ACCEPT.

        Raises:
            QueueFullError: a bound is reached.
            ConflictError: the id is taken by another request.
        """
        request, ticket = submission.request, submission.ticket
        body, seed = encode(request), f"{submission.seed:016x}"
        wait, priority = keys.wait(ticket.priority), ticket.priority
        reply = await self._run(
            "accept",
            [keys.state(request.id), wait, keys.ORDINAL, keys.LOAD],
            [request.id, body, encode(ticket), digest(body, seed), seed, priority, ticket.key_id, ticket.cost_tokens]
            + [submission.reply, submission.timeout_ms, submission.retain_ms, *bounds, keys.WAKE],
        )
        match reply[0]:
            case b"full":
                raise QueueFullError(f"the queue is full: its bound in {reply[1].decode()} is reached")
            case b"conflict":
                raise ConflictError(f"another request has the id {request.id}")
            case outcome:
                return Accepted(int(reply[1]), outcome == b"ok")

    async def form(
        self, worker_id: str, cohort_id: str, request_ids: Sequence[str], *, rows_per_key: int = 0, wire: int = 1
    ) -> list[str]:
        """FORM; returns the ids that were sent."""
        reply = await self._run(
            "form",
            [keys.daemon(worker_id), keys.jobs(worker_id), keys.rows(worker_id), keys.KEY_ROWS]
            + [keys.WAIT_INTERACTIVE, keys.WAIT_OFFLINE, keys.WAIT_RETURNED]
            + [keys.state(request_id) for request_id in request_ids],
            [worker_id, cohort_id, rows_per_key, wire, *request_ids],
        )
        return [request_id.decode() for request_id in reply]

    async def commit(self, worker_id: str, rows: Sequence[RowCommit], messages: Mapping[str, bytes]) -> CommitResult:
        """COMMIT; `messages` maps reply channels to encoded events."""
        script_keys: list[str] = []
        args: list[Any] = [worker_id, len(rows), len(messages)]
        for row in rows:
            script_keys += _request_keys(row.seat.request_id)
            args += [*row.seat, row.position, row.tokens, len(row.logprobs), *row.logprobs]
        for channel, message in messages.items():
            args += [channel, message]
        return _commit_result(await self._run("commit", script_keys, args))

    async def finish(self, worker_id: str, row: RowFinish) -> FinishResult:
        """FINISH."""
        request_id, attempt = row.seat
        reply = await self._run(
            "finish",
            [*_request_keys(request_id), keys.daemon(worker_id), keys.rows(worker_id)]
            + [keys.LOAD, keys.ENDED, keys.KEY_ROWS],
            [request_id, worker_id, attempt, row.length, row.status, row.cause, encode_events([row.event]), keys.WAKE],
        )
        return FinishResult(reply[0].decode(), int(reply[1]) if len(reply) > 1 else 0)

    async def hand_back(
        self, worker_id: str, seats: Sequence[Seat], *, is_crash: bool, max_crashes: int = 3
    ) -> dict[str, HandBackOutcome]:
        """HAND_BACK; returns what became of each request."""
        script_keys = [keys.daemon(worker_id), keys.rows(worker_id), keys.WAIT_RETURNED, keys.LOAD, keys.ENDED]
        script_keys += [keys.KEY_ROWS, keys.DEAD_LETTERS]
        args: list[Any] = [worker_id, int(is_crash), max_crashes, DEAD_LETTERS_KEPT, keys.WAKE]
        for seat in seats:
            script_keys += _request_keys(seat.request_id)
            args += seat
        reply = await self._run("hand_back", script_keys, args)
        return {
            request_id.decode(): cast("HandBackOutcome", outcome.decode())
            for request_id, outcome in zip(reply[::2], reply[1::2], strict=True)
        }

    async def cancel(self, request_id: str, cause: Cause) -> CancelOutcome:
        """CANCEL; the first cause stays."""
        reply = await self._run(
            "cancel",
            [*_request_keys(request_id), keys.LOAD, keys.ENDED]
            + [keys.WAIT_INTERACTIVE, keys.WAIT_OFFLINE, keys.WAIT_RETURNED],
            [request_id, cause, keys.CONTROL],
        )
        return cast("CancelOutcome", reply.decode())

    async def register(self, registration: Registration) -> None:
        """REGISTER."""
        record = [part for pair in registration.fields.items() for part in pair]
        tokenizer_files = [part for pair in registration.tokenizer_files.items() for part in pair]
        await self._run(
            "register",
            [keys.daemon(registration.daemon_id), keys.DAEMONS, keys.MODELS, keys.tokenizer(registration.tokenizer)],
            [registration.daemon_id, RECORD_TTL_MS, _optional(registration.free_rows)]
            + [_optional(registration.free_tokens), registration.model, registration.card, TOKENIZER_TTL_MS]
            + [len(registration.fields), *record, *tokenizer_files],
        )

    async def beat(
        self, daemon_id: str, changed: Mapping[str, str | int], *, model: str = "", tokenizer: str = ""
    ) -> int:
        """BEAT; the new counter, or 0 when this daemon was declared dead."""
        changes = [part for pair in changed.items() for part in pair]
        reply = await self._run(
            "beat",
            [keys.daemon(daemon_id), keys.jobs(daemon_id), keys.rows(daemon_id), keys.LAST_SEEN]
            + [keys.tokenizer(tokenizer)],
            [RECORD_TTL_MS, model, TOKENIZER_TTL_MS, *changes],
        )
        return int(reply)

    async def retire(self, daemon_id: str) -> list[Seat]:
        """RETIRE; the rows to hand back before it takes effect, none when the record is gone."""
        reply = await self._run(
            "retire",
            [keys.daemon(daemon_id), keys.jobs(daemon_id), keys.rows(daemon_id), keys.DAEMONS],
            [daemon_id],
        )
        return [Seat(name.decode(), int(attempt)) for name, attempt in zip(reply[::2], reply[1::2], strict=True)]

    async def bury(self, stream: str, entry_id: str, entry: Mapping[bytes, bytes], *, why: str) -> bool:
        """BURY; whether this call took the entry."""
        request_id = entry.get(b"id", b"").decode("utf-8", "replace")
        raw = [part for pair in islice(entry.items(), _BURIED_FIELDS) for part in pair]
        reply = await self._run(
            "bury",
            [stream, keys.DEAD_LETTERS, *_request_keys(request_id), keys.LOAD, keys.ENDED],
            [entry_id, DEAD_LETTERS_KEPT, request_id, why, *_counted_load(entry), *raw],
        )
        return bool(reply)

    async def lease(self, holder: str, lease_ms: int) -> bool:
        """LEASE; whether `holder` has it now."""
        return bool(await self._run("lease", [keys.FORMER_LEASE], [holder, lease_ms]))

    async def _run(self, name: str, script_keys: Sequence[str], args: Sequence[Any]) -> Any:
        with translated():
            return await self._scripts[name](keys=script_keys, args=args)


@dataclass(frozen=True, slots=True)
class Registration:
    """A daemon's record; the fields from `free_rows` on are a worker's."""

    daemon_id: str
    fields: Mapping[str, str | int | bytes]
    """`kind`, `host`, `pid`, `wire`; a worker's also `lane`, `accepting`, `phase`."""
    free_rows: int | None = None
    free_tokens: int | None = None
    model: str = ""
    card: bytes = b""
    tokenizer: str = ""
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)


def source(name: str) -> str:
    """The text of a script as it is sent: the shared prelude, then its own file."""
    folder = files("broker") / "lua"
    return (folder / "prelude.lua").read_text() + "\n" + (folder / f"{name}.lua").read_text()


def digest(body: bytes, seed: str) -> str:
    """What must be equal for two requests with one id to be the same request."""
    return hashlib.sha256(body + seed.encode()).hexdigest()


def _request_keys(request_id: str) -> tuple[str, str, str]:
    return keys.state(request_id), keys.log(request_id), keys.logprobs(request_id)


def _counted_load(entry: Mapping[bytes, bytes]) -> tuple[str, int]:
    """Priority and cost under which a waiting entry was counted; an entry of any other kind counts nowhere."""
    priority, cost = entry.get(b"priority", b""), entry.get(b"cost", b"")
    is_counted = priority in (b"interactive", b"offline") and cost.isdigit()
    return (priority.decode(), int(cost)) if is_counted else ("", 0)


def _optional(value: int | None) -> str | int:
    return "" if value is None else value


def _commit_result(reply: Sequence[Any]) -> CommitResult:
    if reply[0] == b"ok":
        pairs = zip(reply[1::2], reply[2::2], strict=True)
        return CommitResult(wanted_ends={request_id.decode(): cast("Cause", c.decode()) for request_id, c in pairs})
    triples = zip(reply[1::3], reply[2::3], reply[3::3], strict=True)
    return CommitResult(refused=tuple(Refusal(i.decode(), why.decode(), int(length)) for i, why, length in triples))
