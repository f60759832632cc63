"""`mtplx dead`: the requests that were given up on, for a person to look at, try again or drop."""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from broker.connection.entrance import opened
from broker.dead_letters import DeadLetter, DeadLetters
from broker.errors import WireError
from broker.wire import unpack_tokens

T = TypeVar("T")


def list_dead(url: str, *, as_json: bool) -> None:
    """Show all of them."""
    letters = _with(url, lambda dead: dead.all())
    if as_json:
        click.echo(json.dumps([_short(letter) for letter in letters], indent=2))
        return
    table = Table("letter", "request", "since", "why")
    for letter in letters:
        since = datetime.datetime.fromtimestamp(letter.at_ms / 1000).isoformat(" ", "seconds")
        table.add_row(letter.id, letter.request_id, since, letter.why)
    Console().print(table if letters else "no dead letters")


def show_dead(url: str, name: str) -> None:
    """Everything about one, as JSON; its prompt as token ids."""
    click.echo(json.dumps(_long(_with(url, lambda dead: dead.find(name))), indent=2))


def requeue_dead(url: str, name: str) -> None:
    """Try one again under a new id."""

    async def requeue(dead: DeadLetters) -> str:
        return await dead.requeue(await dead.find(name))

    click.echo(_with(url, requeue))


def drop_dead(url: str, name: str) -> None:
    """Take one off the list for good."""

    async def drop(dead: DeadLetters) -> None:
        await dead.drop(await dead.find(name))

    _with(url, drop)


def _with(url: str, work: Callable[[DeadLetters], Awaitable[T]]) -> T:
    async def run() -> T:
        async with opened(url) as client:
            return await work(DeadLetters(client))

    return asyncio.run(run())


def _short(letter: DeadLetter) -> dict[str, Any]:
    return {"letter": letter.id, "request": letter.request_id, "at_ms": letter.at_ms, "why": letter.why}


def _long(letter: DeadLetter) -> dict[str, Any]:
    try:
        request, ticket = letter.request()
    except WireError:
        raw = {name.decode("utf-8", "replace"): value.hex() for name, value in letter.fields.items()}
        return _short(letter) | {"raw_hex": raw}
    return _short(letter) | {
        "model": request.model,
        "profile": request.profile,
        "prompt": unpack_tokens(request.prompt),
        "max_tokens": request.max_tokens,
        "priority": ticket.priority,
        "key": ticket.key_id,
    }
