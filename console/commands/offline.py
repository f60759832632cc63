"""`mtplx run`, `mtplx batch` and `mtplx dead`: their flags. What they do lies in `run.py`, `batch.py` and `dead.py`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from console.addresses import api_url_of, redis_url_of, running_api_url
from console.flags import takes
from console.outputs import NewFile
from console.settings import ASK, Settings, load

if TYPE_CHECKING:
    from api.bulk.rows import Source

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_NEW_FILE = NewFile()
FORMATS = ("jsonl", "csv", "tsv", "txt", "parquet")
_AS_JSON = click.option("--json", "as_json", is_flag=True, help="As JSON.")
_BATCH = click.argument("batch_id")
_LETTER = click.argument("letter")


@click.command()
@click.argument("prompts", type=_FILE)
@click.option("-o", "--output", type=_NEW_FILE, required=True, help="JSON lines, written as answers come.")
@click.option("--model", help="Name of the model.  [default: the one that is served]")
@click.option("--format", type=click.Choice(FORMATS), help="What PROMPTS holds.  [default: as its name says]")
@click.option("--encoding", help="Encoding of PROMPTS, such as cp1252.  [default: UTF-8, or as its first bytes say]")
@click.option("--separator", help="Character between the cells of a table, or tab.  [default: as its first line shows]")
@click.option("--column", help="Column of a table with the prompt.  [default: prompt]")
@click.option("--template", help="Prompt with {column} where a column's value goes.")
@click.option("--system", help="System message before every prompt.")
@click.option("--raw", is_flag=True, help="Go on with the prompts as texts; no chat template.")
@click.option("--max-tokens", type=int, help="Longest answer.")
@click.option("--temperature", type=float, help="0 is greedy.")
@click.option("--seed", type=int, help="Seed of every row.")
@click.option("--set", "more", multiple=True, metavar="FIELD=JSON", help="Any other field of every call.")
@click.option("--keep-order", is_flag=True, help="Answers in the order of the prompts.")
@click.option("--overwrite", is_flag=True, help="Begin anew over an output that is there.")
@click.option("--in-flight", type=click.IntRange(1, 10_000), default=128, show_default=True, help="Rows at once.")
@takes(ASK)
def run(*, prompts: Path, output: Path, raw: bool, keep_order: bool, more: tuple[str, ...], **flags: Any) -> None:
    """Answer a file of prompts through the queue, offline: whoever chats goes first.

    PROMPTS is .jsonl (a text, or an object with prompt or messages and further fields; also a batch's input file),
    .txt (a prompt a line), .csv, .tsv or .parquet. Broken off by Ctrl-C or worse, the same command goes on where it
    was. The exit status is 0 when every row has an answer, 1 when some row has an error instead, 3 when there are no
    rows, 130 when it was broken off.
    """
    from api.errors import ApiConfigError, ApiError
    from console.commands.run import RunOptions, run_run

    own = {name: flags.pop(name) for name in ("model", "column", "template", "system", "overwrite", "in_flight")}
    fields = {name: flags.pop(name) for name in ("max_tokens", "temperature", "seed")}
    source = _source(*(flags.pop(name) for name in ("format", "encoding", "separator")))
    given = {name: value for name, value in fields.items() if value is not None} | _more(more)
    options = RunOptions(
        prompts=prompts, output=output, is_raw=raw, keeps_order=keep_order, fields=given, source=source, **own
    )
    try:
        status = run_run(redis_url_of(_settings(flags)), options)
    except (ApiError, ApiConfigError, OSError) as error:
        raise click.ClickException(str(error)) from error
    sys.exit(status)


@click.group()
def batch() -> None:
    """Hand files of calls to a server's Batch API."""


@batch.command()
@click.argument("file", type=_FILE)
@click.option("--endpoint", help="As in POST /v1/batches.  [default: that of the first line]")
@click.option("--window", default="24h", show_default=True, help="Time it may take.")
@takes(ASK)
def submit(*, file: Path, endpoint: str | None, window: str, **flags: Any) -> None:
    """Upload a file and have it run; prints the batch's id."""
    from console.commands.batch import submit

    submit(_server(flags), file, endpoint=endpoint, window=window)


@batch.command()
@click.argument("batch_id", required=False)
@_AS_JSON
@takes(ASK)
def status(*, batch_id: str | None, as_json: bool, **flags: Any) -> None:
    """Show one batch, or the newest ones."""
    from console.commands.batch import status

    status(_server(flags), batch_id, as_json=as_json)


@batch.command()
@_BATCH
@takes(ASK)
def wait(*, batch_id: str, **flags: Any) -> None:
    """Wait until a batch is over; the exit status is 0 when every line has an answer."""
    from console.commands.batch import wait

    sys.exit(wait(_server(flags), batch_id))


@batch.command()
@_BATCH
@takes(ASK)
def cancel(*, batch_id: str, **flags: Any) -> None:
    """End a batch early; what is finished can be fetched."""
    from console.commands.batch import cancel

    cancel(_server(flags), batch_id)


@batch.command()
@_BATCH
@click.option("-o", "--output", type=_NEW_FILE, required=True, help="Where the output file goes.")
@click.option("--errors", type=_NEW_FILE, help="Where the error file goes.")
@takes(ASK)
def fetch(*, batch_id: str, output: Path, errors: Path | None, **flags: Any) -> None:
    """Download what a batch has answered."""
    from console.commands.batch import fetch

    sys.exit(fetch(_server(flags), batch_id, output=output, errors=errors))


@click.group()
def dead() -> None:
    """Look after requests that were given up on."""


@dead.command("list")
@_AS_JSON
@takes(ASK)
def list_(*, as_json: bool, **flags: Any) -> None:
    """Show all of them, newest first."""
    from console.commands.dead import list_dead

    list_dead(redis_url_of(_settings(flags)), as_json=as_json)


@dead.command()
@_LETTER
@takes(ASK)
def show(*, letter: str, **flags: Any) -> None:
    """Show one, by its own id or its request's."""
    from console.commands.dead import show_dead

    show_dead(redis_url_of(_settings(flags)), letter)


@dead.command()
@_LETTER
@takes(ASK)
def requeue(*, letter: str, **flags: Any) -> None:
    """Try one again, offline; prints the id it has now."""
    from console.commands.dead import requeue_dead

    requeue_dead(redis_url_of(_settings(flags)), letter)


@dead.command()
@_LETTER
@takes(ASK)
def drop(*, letter: str, **flags: Any) -> None:
    """Take one off the list for good."""
    from console.commands.dead import drop_dead

    drop_dead(redis_url_of(_settings(flags)), letter)


def _server(flags: Mapping[str, Any]) -> Any:
    from console.commands.batch import Server

    settings = _settings(flags)
    return Server(settings.server or running_api_url(settings) or api_url_of(settings), settings.api_key)


def _settings(flags: Mapping[str, Any]) -> Settings:
    return load(flags, environ=os.environ, directory=Path.cwd())


def _source(format: Any, encoding: str | None, separator: str | None) -> Source:
    """Raises: click.UsageError."""
    from api.bulk.rows import Source

    try:
        io.TextIOWrapper(io.BytesIO(), encoding=encoding or "utf-8")  # knows encodings of text from other codecs
    except LookupError as error:
        raise click.UsageError(f"--encoding {encoding}: unknown; allowed: utf-8, utf-16, cp1252, latin-1") from error
    separator = "\t" if separator in ("tab", "\\t") else separator
    if separator is not None and (len(separator) != 1 or separator in '"\r\n'):
        raise click.UsageError(f"--separator {separator}: allowed: one character, or tab")
    return Source(format, encoding or "", separator)


def _more(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Raises: click.UsageError."""
    fields = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise click.UsageError(f"--set {pair}: allowed: FIELD=JSON, such as top_k=20")
        try:
            fields[name] = msgspec.json.decode(text)
        except msgspec.MsgspecError as error:
            raise click.UsageError(f"--set {pair}: not JSON: {error}") from error
    return fields
