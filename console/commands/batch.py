"""`mtplx batch`: files of calls handed to a server's Batch API, looked after and fetched. Speaks HTTP alone."""

from __future__ import annotations

import json
import secrets
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, cast

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from console.web import open_url

OVER = frozenset({"failed", "completed", "expired", "cancelled"})
EXIT_NOT_COMPLETED = 1
POLL_S = 1.0
CHUNK_BYTES = 1 << 20
TIMEOUT_S = 60.0

BatchObject = Mapping[str, Any]


class ServerError(click.ClickException):
    """The server refused, or cannot be reached."""


@dataclass(frozen=True, slots=True)
class Server:
    """One API."""

    url: str
    api_key: str | None = None

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Raises: ServerError."""
        data = None if body is None else json.dumps(body).encode()
        with self.open(method, path, data, {"Content-Type": "application/json"}) as reply:
            return cast("dict[str, Any]", json.loads(reply.read()))

    def upload(self, path: Path) -> dict[str, Any]:
        """A file for a batch, streamed. Raises: ServerError."""
        boundary = secrets.token_hex(16)
        part = f'--{boundary}\r\nContent-Disposition: form-data; name="'
        head = f'{part}purpose"\r\n\r\nbatch\r\n{part}file"; filename="{path.name}"\r\n\r\n'.encode()
        tail = f"\r\n--{boundary}--\r\n".encode()
        headers = {
            "Content-Type": f"multipart/form-data; boundary={boundary}",
            "Content-Length": str(len(head) + path.stat().st_size + len(tail)),
        }
        with self.open("POST", "/v1/files", _stream(head, path, tail), headers) as reply:
            return cast("dict[str, Any]", json.loads(reply.read()))

    def download(self, file_id: str, path: Path) -> None:
        """A file's content, streamed. Raises: ServerError."""
        with self.open("GET", f"/v1/files/{file_id}/content") as reply, path.open("wb") as file:
            shutil.copyfileobj(reply, file, CHUNK_BYTES)

    def open(self, method: str, path: str, data: Any = None, headers: Mapping[str, str] | None = None) -> HTTPResponse:
        """Raises: ServerError."""
        auth = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        request = urllib.request.Request(
            self.url.rstrip("/") + path, data=data, headers={**(headers or {}), **auth}, method=method
        )
        try:
            return open_url(request, timeout_s=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                raise ServerError(_message(error.read(), error.code)) from error
        except OSError as error:
            raise ServerError(f"{self.url} cannot be reached: {error}") from error


def submit(server: Server, path: Path, *, endpoint: str | None, window: str) -> None:
    """Hand a file over; prints the batch's id."""
    file = server.upload(path)
    body = {"input_file_id": file["id"], "endpoint": endpoint or _endpoint_of(path), "completion_window": window}
    batch = server.call("POST", "/v1/batches", body)
    if batch.get("waits_for"):
        click.echo(f"mtplx: the batch waits: {batch['waits_for']}", err=True)
    click.echo(batch["id"])


def status(server: Server, batch_id: str | None, *, as_json: bool) -> None:
    """One batch, or the newest of all."""
    if batch_id is None:
        batches = server.call("GET", "/v1/batches?limit=20")["data"]
    else:
        batches = [server.call("GET", f"/v1/batches/{batch_id}")]
    if as_json:
        click.echo(json.dumps(batches if batch_id is None else batches[0], indent=2))
        return
    for batch in batches:
        click.echo(describe(batch))


def wait(server: Server, batch_id: str, *, pause: Callable[[float], None] = time.sleep) -> int:
    """Until it is over, with a bar; the exit status."""
    columns = (TextColumn("mtplx: {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("waiting", total=None)
        while True:
            batch = server.call("GET", f"/v1/batches/{batch_id}")
            counts = batch["request_counts"]
            what = f"{batch['status']}: {batch['waits_for']}" if batch.get("waits_for") else batch["status"]
            done = counts["completed"] + counts["failed"]
            bar.update(task, description=what, total=counts["total"] or None, completed=done)
            if batch["status"] in OVER:
                break
            pause(POLL_S)
    click.echo(describe(batch))
    return 0 if batch["status"] == "completed" and not batch["request_counts"]["failed"] else EXIT_NOT_COMPLETED


def cancel(server: Server, batch_id: str) -> None:
    """Have it end early."""
    click.echo(describe(server.call("POST", f"/v1/batches/{batch_id}/cancel", {})))


def fetch(server: Server, batch_id: str, *, output: Path, errors: Path | None) -> int:
    """Its output file, and its error file where one was asked for; the exit status."""
    batch = server.call("GET", f"/v1/batches/{batch_id}")
    if batch["status"] not in OVER:
        raise ServerError(f"batch {batch_id} is {batch['status']}; mtplx batch wait {batch_id} waits for it")
    wanted = [(batch["output_file_id"], output)] + ([(batch["error_file_id"], errors)] if errors is not None else [])
    for file_id, path in wanted:
        if file_id is None:
            path.write_bytes(b"")
        else:
            server.download(file_id, path)
    click.echo(describe(batch), err=True)
    return 0 if batch["status"] == "completed" else EXIT_NOT_COMPLETED


def describe(batch: BatchObject) -> str:
    """One batch in one line, and what is wrong with its file below."""
    counts = batch["request_counts"]
    text = f"{batch['id']}  {batch['status']}  {counts['completed']} of {counts['total']} answered"
    if counts["failed"]:
        text += f", {counts['failed']} failed"
    if batch.get("waits_for"):
        text += f"; waits: {batch['waits_for']}"
    for error in (batch["errors"] or {"data": []})["data"]:
        where = f"line {error['line']}: " if error["line"] is not None else ""
        text += f"\n  {where}{error['message']}"
    return text


def _endpoint_of(path: Path) -> str:
    """What the first line of the file asks for."""
    from api.bulk.lines import read_lines

    try:
        with path.open("rb") as file:
            first = next(read_lines(file))
        return str(json.loads(first.data).get("url", "/v1/chat/completions"))
    except (StopIteration, ValueError, AttributeError):
        return "/v1/chat/completions"  # the server says what is wrong with the line


def _stream(head: bytes, path: Path, tail: bytes) -> Iterator[bytes]:
    yield head
    with path.open("rb") as file:
        while data := file.read(CHUNK_BYTES):
            yield data
    yield tail


def _message(body: bytes, status_code: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {status_code}"
