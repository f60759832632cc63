"""Notes beside requests: bytes kept under a call's id by whoever submitted it, so that another program can read on."""

from __future__ import annotations

from typing import cast

from broker import keys
from broker.client.client import Client
from broker.connection.connect import translated


async def write_note(client: Client, call_id: str, note: bytes, *, ttl_ms: int) -> None:
    """Raises: BrokerUnavailableError."""
    with translated():
        await client.commands.set(keys.note(call_id), note, px=ttl_ms)


async def read_note(client: Client, call_id: str) -> bytes | None:
    """Raises: BrokerUnavailableError."""
    with translated():
        return cast("bytes | None", await client.commands.get(keys.note(call_id)))
