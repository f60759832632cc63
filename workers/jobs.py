"""Reads the worker's own job stream and turns seats into rows. Redis in, rows out; the engine is not known here.

An entry is deleted once its rows are taken in; until then, and after a restart of Redis that lost the deletion, it is
read again, which does no harm: a row that is here already, or is no longer ours, is passed over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from redis.asyncio import Redis

from broker import keys
from broker.connection.connect import translated
from broker.errors import WireError
from broker.scripts import RowFinish, Scripts
from broker.text.token_bytes import ByteTable
from broker.wire import (
    WIRE_VERSION,
    Assignment,
    Cause,
    Failed,
    Request,
    decode_logprob,
    decode_request,
    unpack_tokens,
)
from workers.running_row import ANY_LENGTH, ActiveRow
from workers.stop_detection import StopDetector

logger = logging.getLogger(__name__)

HALF_OPEN_S = 5.0
"""How much longer than its BLOCK a read may take before its connection is given up."""
_STATE_FIELDS = (
    "status", "owner", "attempt", "cancel", "body", "seed", "reply", "priority", "accepted_ms", "formed_ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenDecoder:
    """What a lane's tokens are in bytes, and which of them end a text."""

    table: ByteTable | None
    eos_token_ids: frozenset[int]

    def follow(self, request: Request) -> StopDetector:
        ending = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else self.eos_token_ids)
        return StopDetector(self.table, stops=request.stop, ending=ending, min_tokens=request.min_tokens)


class JobEntry(NamedTuple):
    """One entry of the job stream, as it lies there."""

    id: str
    fields: Mapping[bytes, bytes]

    @property
    def cohort(self) -> str:
        """Which cohort it is; its own id where none is named."""
        return self.fields.get(b"cohort", b"").decode(errors="replace") or self.id


class JobReader:
    """Reads jobs for one worker id at a time."""

    def __init__(self, commands: Redis, blocking: Redis, scripts: Scripts) -> None:
        self._commands = commands
        self._blocking = blocking
        self._scripts = scripts

    async def read(self, worker_id: str, *, block_ms: int | None) -> list[JobEntry]:
        """All entries of the stream; waits for one if there is none and `block_ms` is given."""
        patience_s = HALF_OPEN_S + (block_ms or 0) / 1000
        with translated():
            async with asyncio.timeout(patience_s):
                reply = await self._blocking.xread({keys.jobs(worker_id): "0"}, block=block_ms)
        streams = reply.items() if isinstance(reply, dict) else reply or []
        return [JobEntry(entry_id.decode(), fields) for _, entries in streams for entry_id, fields in _flat(entries)]

    async def delete(self, worker_id: str, entry: JobEntry) -> None:
        with translated():
            await self._commands.xdel(keys.jobs(worker_id), entry.id)

    async def seats(self, worker_id: str, entry: JobEntry) -> list[Assignment]:
        """The seats of an entry; none if nobody can read it, and then it goes to the dead letters."""
        try:
            return parse_seats(entry.fields)
        except WireError as error:
            logger.error("unreadable job: %s", error, extra={"worker": worker_id})
            await self._scripts.bury(keys.jobs(worker_id), entry.id, entry.fields, why=str(error))
            return []

    async def load(self, worker_id: str, seats: Sequence[Assignment], tongue: TokenDecoder) -> list[ActiveRow]:
        """The rows of these seats that are this worker's to decode; a row that cannot be read fails here."""
        with translated():
            pipe = self._commands.pipeline(transaction=False)
            for seat in seats:
                pipe.hmget(keys.state(seat.request_id), *_STATE_FIELDS)
                pipe.get(keys.log(seat.request_id))
                pipe.lrange(keys.logprobs(seat.request_id), 0, -1)
            replies = await pipe.execute() if seats else []
        rows = []
        for seat, state, log, scores in zip(seats, replies[::3], replies[1::3], replies[2::3], strict=True):
            record = _State(*state)
            if not record.is_owned_by(worker_id, seat):
                logger.info("a seat was taken back before it was read", extra=_where(seat, worker_id))
                continue
            try:
                rows.append(_row(seat, record, log or b"", scores, tongue))
            except WireError as error:
                await self._fail(worker_id, seat, str(error))
        return rows

    async def _fail(self, worker_id: str, seat: Assignment, why: str) -> None:
        logger.error("unreadable request: %s", why, extra=_where(seat, worker_id))
        event = Failed(seat.request_id, "unreadable", f"the worker could not read the request: {why}")
        await self._scripts.finish(worker_id, RowFinish(seat, ANY_LENGTH, "failed", "unreadable", event))


class _State(NamedTuple):
    status: bytes | None
    owner: bytes | None
    attempt: bytes | None
    cancel: bytes | None
    body: bytes | None
    seed: bytes | None
    reply: bytes | None
    priority: bytes | None
    accepted_ms: bytes | None
    formed_ms: bytes | None

    @property
    def age_s(self) -> float:
        """How long it had waited when it was formed, by Redis' clock."""
        return (int(self.formed_ms or 0) - int(self.accepted_ms or 0)) / 1000

    def is_owned_by(self, worker_id: str, seat: Assignment) -> bool:
        owner = (self.status, self.owner, self.attempt)
        return owner == (b"running", worker_id.encode(), str(seat.attempt).encode())


def parse_seats(fields: Mapping[bytes, bytes]) -> list[Assignment]:
    """The seats of a job entry.

    Raises:
        WireError: it is not a job, or one of a newer version.
    """
    try:
        if int(fields.get(b"wire", b"1")) > WIRE_VERSION:
            raise WireError(f"the job needs wire version {int(fields[b'wire'])}, this worker reads {WIRE_VERSION}")
        words = fields[b"seats"].decode().split(" ")
        return [Assignment(name, int(attempt)) for name, attempt in zip(words[::2], words[1::2], strict=True)]
    except (KeyError, ValueError) as error:
        raise WireError(f"not a job: {type(error).__name__}") from None  # its text would quote what was in it


def _row(seat: Assignment, state: _State, log: bytes, scores: Sequence[bytes], tongue: TokenDecoder) -> ActiveRow:
    request = decode_request(state.body or b"")
    row = ActiveRow(
        seat=seat,
        request=request,
        prompt=unpack_tokens(request.prompt),
        seed=_seed(state.seed),
        reply=(state.reply or b"").decode(),
        text=tongue.follow(request),
        is_offline=state.priority == b"offline",
        age_s=state.age_s,
    )
    row.resume(log, [decode_logprob(score) for score in scores])
    if state.cancel is not None and row.is_running:
        row.cancel(cast("Cause", state.cancel.decode()))
    return row


def _seed(raw: bytes | None) -> int:
    try:
        return int(raw or b"", 16)
    except ValueError as error:
        raise WireError(f"the seed {raw!r} is not hexadecimal") from error


def _flat(entries: Any) -> list[tuple[bytes, Mapping[bytes, bytes]]]:
    """redis-py nests a stream's entries once more under RESP3."""
    return [pair for page in entries for pair in page] if entries and isinstance(entries[0], list) else entries


def _where(seat: Assignment, worker_id: str) -> dict[str, str | int]:
    return {"request_id": seat.request_id, "attempt": seat.attempt, "worker": worker_id}
