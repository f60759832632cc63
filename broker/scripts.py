"""Typed wrappers of every Lua script; nobody else runs one. Each is safe to run twice."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import islice
from typing import Any, Literal, NamedTuple, cast

from msgspec import structs
from redis.asyncio import Redis

from broker import keys
from broker.connection.connect import translated
from broker.errors import ConflictError, QueueFullError, QuotaError
from broker.wire import Assignment, Cause, Failed, Finished, Request, Status, Ticket, encode, encode_events, seed_of

RECORD_TTL_MS = 14 * 24 * 3600 * 1000
"""A daemon's record outlives any outage; death is decided by the watcher, never by this."""
TOKENIZER_TTL_MS = 7 * 24 * 3600 * 1000
DEAD_LETTERS_KEPT = 10_000
_BURIED_FIELDS = 64
"""More fields than any entry of ours has; Lua cannot pass on an unbounded number."""

_NAMES = [
    "accept",
    "form",
    "commit",
    "finish",
    "hand_back",
    "cancel",
    "reject",
    "register",
    "beat",
    "retire",
    "bury",
    "lease",
    "keep",
]


class Bounds(NamedTuple):
    """How much of one priority may be accepted and not yet ended."""

    requests: int = 10_000
    tokens: int = 50_000_000


DEFAULT_BOUNDS = Bounds()


class Quota(NamedTuple):
    """What one API key may have per minute; 0: no bound."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0


class Idempotency(NamedTuple):
    """The caller's name for a request, under which it is accepted once."""

    digest: str
    """Hash of the caller's key."""
    keep_ms: int = 24 * 3600 * 1000
    said: str = ""
    """Hash of what the caller said, where the request made of it may be another when it is said again."""


class Accepted(NamedTuple):
    ordinal: int
    is_new: bool
    """False when the same request had been accepted before."""
    request_id: str = ""
    """The id it was accepted under, an older one where the idempotency key is known."""
    requests_left: int | None = None
    """What the API key's quota still allows; None without a bound."""
    tokens_left: int | None = None


@dataclass(frozen=True, slots=True)
class Submission:
    """A request with everything ACCEPT writes about it."""

    request: Request
    ticket: Ticket
    seed: int | None = None
    """None: derived from the id."""
    reply: str = ""
    """Reply channel of the listener; empty when nobody listens."""
    timeout_ms: int = 3_600_000
    retain_ms: int = 600_000
    quota: Quota = Quota()
    idempotency: Idempotency | None = None


@dataclass(frozen=True, slots=True)
class RowCommit:
    """Tokens of one row for COMMIT; none while it is in prefill."""

    seat: Assignment
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

    seat: Assignment
    length: int
    """Tokens the log must hold; -1: any."""
    status: Status
    cause: str
    event: Finished | Failed


class FinishResult(NamedTuple):
    outcome: Literal["ok", "again", "lost", "short"]
    length: int = 0


HandBackOutcome = Literal["waiting", "ended", "dead", "lost"]
CancelOutcome = Literal["unknown", "wanted", "ended", "cancelled", "pending"]


class Scripts:
    """All scripts, bound to one command client."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._scripts = {name: client.register_script(source(name)) for name in _NAMES}

    async def accept(self, submission: Submission, bounds: Bounds) -> Accepted:
        """ACCEPT.

        Raises:
            QueueFullError: a bound is reached.
            QuotaError: the API key has used up what it may have.
            ConflictError: the id or the idempotency key is taken by another request.
        """
        reply = await self._run("accept", *accept_call(submission, bounds))
        return _accepted(reply, submission.request.id)

    async def form(
        self,
        worker_id: str,
        cohort_id: str,
        request_ids: Sequence[str],
        *,
        rows_per_key: int = 0,
        wire: int = 1,
        over_younger_ms: int | None = None,
    ) -> list[str]:
        """FORM; returns the ids that were sent.

        Args:
            over_younger_ms: let interactive requests take the places of offline rows accepted less long ago.
        """
        reply = await self._run(
            "form",
            [keys.daemon(worker_id), keys.jobs(worker_id), keys.rows(worker_id), keys.KEY_ROWS]
            + [keys.WAIT_INTERACTIVE, keys.WAIT_OFFLINE, keys.WAIT_RETURNED]
            + [keys.state(request_id) for request_id in request_ids],
            [worker_id, cohort_id, rows_per_key, wire, _optional(over_younger_ms), *request_ids],
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
            + [keys.LOAD, keys.ENDED, keys.KEY_ROWS, keys.LIVE],
            [request_id, worker_id, attempt, row.length, row.status, row.cause, encode_events([row.event]), keys.WAKE],
        )
        return FinishResult(reply[0].decode(), int(reply[1]) if len(reply) > 1 else 0)

    async def hand_back(
        self, worker_id: str, seats: Sequence[Assignment], *, is_crash: bool, max_crashes: int = 3
    ) -> dict[str, HandBackOutcome]:
        """HAND_BACK; returns what became of each request."""
        script_keys = [keys.daemon(worker_id), keys.rows(worker_id), keys.WAIT_RETURNED, keys.LOAD, keys.ENDED]
        script_keys += [keys.KEY_ROWS, keys.DEAD_LETTERS, keys.LIVE]
        args: list[Any] = [worker_id, int(is_crash), max_crashes, DEAD_LETTERS_KEPT, keys.WAKE]
        for seat in seats:
            script_keys += _request_keys(seat.request_id)
            args += seat
        reply = await self._run("hand_back", script_keys, args)
        return {
            request_id.decode(): cast("HandBackOutcome", outcome.decode())
            for request_id, outcome in zip(reply[::2], reply[1::2], strict=True)
        }

    async def keep(self, request_id: str, for_ms: int) -> str:
        """KEEP; the request's status, empty when there is none."""
        return str((await self._run("keep", [keys.state(request_id)], [for_ms])).decode())

    async def cancel(self, request_id: str, cause: Cause, *, if_unwanted: bool = False) -> CancelOutcome:
        """CANCEL; the first cause stays. With `if_unwanted` only a request that nobody keeps."""
        reply = await self._run(
            "cancel",
            [*_request_keys(request_id), keys.LOAD, keys.ENDED]
            + [keys.WAIT_INTERACTIVE, keys.WAIT_OFFLINE, keys.WAIT_RETURNED, keys.LIVE],
            [request_id, cause, keys.CONTROL, int(if_unwanted)],
        )
        return cast("CancelOutcome", reply.decode())

    async def reject(self, request_id: str, failed: Failed) -> bool:
        """REJECT; whether the request still waited."""
        reply = await self._run(
            "reject",
            [*_request_keys(request_id), keys.LOAD, keys.ENDED, keys.LIVE]
            + [keys.WAIT_INTERACTIVE, keys.WAIT_OFFLINE, keys.WAIT_RETURNED],
            [request_id, failed.code, failed.message],
        )
        return bool(reply)

    async def register(self, registration: Registration) -> None:
        """REGISTER."""
        record = [part for pair in registration.fields.items() for part in pair]
        tokenizer_files = [part for pair in registration.tokenizer_files.items() for part in pair]
        await self._run(
            "register",
            [keys.daemon(registration.daemon_id), keys.DAEMONS, keys.MODELS, keys.tokenizer(registration.tokenizer)]
            + [keys.LAST_SEEN],
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

    async def retire(self, daemon_id: str) -> list[Assignment]:
        """RETIRE; the rows to hand back before it takes effect, none when the record is gone."""
        reply = await self._run(
            "retire",
            [keys.daemon(daemon_id), keys.jobs(daemon_id), keys.rows(daemon_id), keys.DAEMONS]
            + [keys.listening(daemon_id)],
            [daemon_id],
        )
        return [Assignment(name.decode(), int(attempt)) for name, attempt in zip(reply[::2], reply[1::2], strict=True)]

    async def bury(self, stream: str, entry_id: str, entry: Mapping[bytes, bytes], *, why: str) -> bool:
        """BURY; whether this call took the entry."""
        request_id = entry.get(b"id", b"").decode("utf-8", "replace")
        raw = [part for pair in islice(entry.items(), _BURIED_FIELDS) for part in pair]
        reply = await self._run(
            "bury",
            [stream, keys.DEAD_LETTERS, *_request_keys(request_id), keys.LOAD, keys.ENDED, keys.LIVE],
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


def accept_call(submission: Submission, bounds: Bounds) -> tuple[list[str], list[Any]]:
    """KEYS and ARGV of ACCEPT."""
    request, ticket, idempotency = submission.request, submission.ticket, submission.idempotency
    ticket = structs.replace(ticket, min_wire=max(ticket.min_wire, request.min_wire))
    seed = seed_of(request.id) if submission.seed is None else submission.seed
    listener = submission.reply.rpartition(":")[2]
    script_keys = [keys.state(request.id), keys.wait(ticket.priority), keys.ORDINAL, keys.LOAD]
    script_keys += [
        keys.bucket(ticket.key_id),
        keys.idempotency(ticket.key_id, idempotency.digest if idempotency else ""),
    ]
    script_keys += [keys.listening(listener), keys.LIVE]
    args: list[Any] = [request.id, encode(request), encode(ticket), digest(submission), f"{seed:016x}", ticket.priority]
    args += [ticket.key_id, ticket.cost_tokens, submission.reply, submission.timeout_ms, submission.retain_ms]
    args += [*bounds, keys.WAKE, ticket.prompt_tokens, *submission.quota, idempotency.keep_ms if idempotency else 0]
    return script_keys, args


def digest(submission: Submission) -> str:
    """Hash of what must be equal for two requests to be the same one: all of it but the id and what follows from it.

    Where the caller's words are known, they and the model are what must be equal.
    """
    if submission.idempotency is not None and submission.idempotency.said:
        return hashlib.sha256(f"{submission.idempotency.said}:{submission.request.model}".encode()).hexdigest()
    anonymous = structs.replace(submission.request, id="")
    return hashlib.sha256(encode(anonymous) + str(submission.seed).encode()).hexdigest()


def _accepted(reply: Sequence[Any], request_id: str) -> Accepted:
    match reply[0]:
        case b"full":
            raise QueueFullError(f"the queue is full: its bound in {reply[1].decode()} is reached")
        case b"quota":
            raise _quota_error(reply[1].decode(), int(reply[2]))
        case b"conflict":
            raise ConflictError(f"another request has the id or idempotency key of {request_id}")
        case b"again":
            return Accepted(int(reply[2]), False, reply[1].decode())
    left = [None if amount < 0 else int(amount) for amount in reply[3:5]]
    return Accepted(int(reply[2]), True, reply[1].decode(), *left)


def _quota_error(what: str, wait_ms: int) -> QuotaError:
    if wait_ms < 0:
        return QuotaError(f"this request alone asks for more {what} than its API key may have in a minute")
    return QuotaError(f"the API key's limit of {what} per minute is reached", retry_after_s=wait_ms / 1000)


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
