"""Reads what daemons have registered: who is there, what they serve, how full they are. Writes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from redis.asyncio import Redis

from broker import keys
from broker.connection.connect import translated
from broker.errors import WireError
from broker.wire import Lane, ModelCard, decode_card, decode_lane


@dataclass(frozen=True, slots=True)
class DaemonRecord:
    """One daemon as its record in Redis says; a worker's also has a lane."""

    id: str
    kind: str
    """`worker`, `former` or `api`."""
    beat: int
    """Heartbeat counter; see `broker.liveness` for what it proves."""
    fields: Mapping[str, str]
    """The record's other text fields: name, host, pid, phase, snapshot and so on."""
    lane: Lane | None = None
    free_rows: int = 0
    """Below 0 while more rows are here than are decoded: offline ones that gave way, paused."""
    held_rows: int | None = None
    """Offline rows that gave way not long ago and are left alone now; None: the worker cannot pause rows."""
    free_tokens: int | None = None
    """Cache slots free; None where rows alone are the bound."""
    is_accepting: bool = False
    is_dead: bool = False
    """Declared dead; its rows are being handed back."""
    progress: int = 0
    active_rows: int = 0
    paused_rows: int = 0
    """Offline rows that gave way to interactive ones and wait where they are."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests accepted and not yet ended, and their tokens, by priority; rows running by API key id."""

    requests: Mapping[str, int]
    tokens: Mapping[str, int]
    key_rows: Mapping[str, int]


class Registry:
    """Reads the registry through a command client."""

    def __init__(self, client: Redis) -> None:
        self._client = client

    async def daemons(self) -> list[DaemonRecord]:
        """Every registered daemon, sorted by id; records this version cannot read are left out."""
        with translated():
            ids = sorted(raw.decode() for raw in await cast("Any", self._client.smembers(keys.DAEMONS)))
            pipe = self._client.pipeline(transaction=False)
            for daemon_id in ids:
                pipe.hgetall(keys.daemon(daemon_id))
            raw_records = await pipe.execute() if ids else []
        records = [_record(daemon_id, raw) for daemon_id, raw in zip(ids, raw_records, strict=True)]
        return [record for record in records if record is not None]

    async def workers(self) -> list[DaemonRecord]:
        """The daemons that serve a lane."""
        return [record for record in await self.daemons() if record.kind == "worker" and record.lane is not None]

    async def cards(self) -> dict[str, ModelCard]:
        """Model identity to card, for every model ever served."""
        with translated():
            raw = await cast("Any", self._client.hgetall(keys.MODELS))
        cards = {}
        for identity, data in raw.items():
            try:
                cards[identity.decode()] = decode_card(data)
            except WireError:
                continue  # written by a newer version; an older API cannot speak for that model
        return cards

    async def last_seen_ms(self) -> dict[str, int]:
        """Model identity to the Redis time in ms at which a worker last said that it serves it."""
        with translated():
            raw = await cast("Any", self._client.hgetall(keys.LAST_SEEN))
        return {identity.decode(): int(ms) for identity, ms in raw.items()}

    async def tokenizer_files(self, digest: str) -> dict[str, bytes]:
        """File name to content; empty when no such tokenizer is stored."""
        with translated():
            raw = await cast("Any", self._client.hgetall(keys.tokenizer(digest)))
        return {name.decode(): content for name, content in raw.items()}

    async def load(self) -> Load:
        """Counters that the scripts keep."""
        with translated():
            pipe = self._client.pipeline(transaction=False)
            pipe.hgetall(keys.LOAD)
            pipe.hgetall(keys.KEY_ROWS)
            load, key_rows = await pipe.execute()
        counts = {name.decode(): int(value) for name, value in load.items()}
        return Load(
            requests=_with_prefix(counts, "requests:"),
            tokens=_with_prefix(counts, "tokens:"),
            key_rows={name.decode(): int(value) for name, value in key_rows.items()},
        )

    async def ended(self) -> dict[str, int]:
        """Requests ended, by `priority:status:cause`."""
        with translated():
            raw = await cast("Any", self._client.hgetall(keys.ENDED))
        return {name.decode(): int(count) for name, count in raw.items()}

    async def now_ms(self) -> int:
        """Redis' clock, the only one that deadlines and ages are measured by."""
        with translated():
            seconds, micros = await cast("Any", self._client.time())
        return int(seconds) * 1000 + int(micros) // 1000


def _record(daemon_id: str, raw: Mapping[bytes, bytes]) -> DaemonRecord | None:
    if not raw:
        return None
    try:
        return _read_record(daemon_id, raw)
    except (WireError, ValueError):
        return None


def _read_record(daemon_id: str, raw: Mapping[bytes, bytes]) -> DaemonRecord:
    lane = decode_lane(raw[b"lane"]) if b"lane" in raw else None
    text = {name.decode(): value.decode("utf-8", "replace") for name, value in raw.items() if name != b"lane"}
    free_tokens, held = text.pop("free_tokens", None), text.pop("held", None)
    return DaemonRecord(
        id=daemon_id,
        kind=text.pop("kind", ""),
        beat=int(text.pop("beat", 0)),
        lane=lane,
        free_rows=int(text.pop("free", 0)),
        held_rows=None if held is None else int(held),
        free_tokens=None if free_tokens is None else int(free_tokens),
        is_accepting=text.pop("accepting", "0") == "1",
        is_dead=text.pop("dead", "0") == "1",
        progress=int(text.pop("progress", 0)),
        active_rows=int(text.pop("active", 0)),
        paused_rows=int(text.pop("paused", 0)),
        fields=text,
    )


def _with_prefix(counts: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): count for name, count in counts.items() if name.startswith(prefix)}
