"""Reads the heartbeat counters together with what proves them: over which connection, from which run of Redis."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from redis.asyncio import Redis

from broker import keys
from broker.connection.connect import server_info, translated

NO_RECORD = -1
"""Counter of a daemon that is on the list and has no readable record: one that nobody took over in time."""


class Connection(NamedTuple):
    """One connection to one run of Redis; clients are numbered anew in every run."""

    run_id: str
    client_id: int


class Beats(NamedTuple):
    """Heartbeat counter of every registered daemon."""

    counters: dict[str, int]
    connection: Connection


async def read_beats(client: Redis) -> Beats:
    """Counters first, connection last: a reconnect in between is seen as a new connection, never missed."""
    with translated():
        ids = [raw.decode() for raw in await cast("Any", client.smembers(keys.DAEMONS))]
        pipe = client.pipeline(transaction=False)
        for daemon_id in ids:
            pipe.hget(keys.daemon(daemon_id), "beat")
        raw_beats = await pipe.execute() if ids else []
        client_id = await client.client_id()
    run_id = str((await server_info(client, "server"))["run_id"])
    counters = {daemon_id: _counter(beat) for daemon_id, beat in zip(ids, raw_beats, strict=True)}
    return Beats(counters, Connection(run_id, client_id))


def _counter(beat: bytes | None) -> int:
    """A record without a number in it is as good as none: its daemon must not stop the watch over the others."""
    return int(beat) if beat is not None and beat.isdigit() else NO_RECORD
