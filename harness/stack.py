"""A whole system in child processes: Redis, formers, workers and API processes, each to be killed at will.

Used by the system tests and the benchmarks. Every child ends with `stop`, whatever happened before.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import httpx
import redis

from broker import keys
from harness.wait import PATIENCE_S

Kind = Literal["redis", "former", "worker", "api", "batcher"]
READY_S = 180.0
_POLL_S = 0.05
"""Each look at a stack takes time from the daemons that it waits for."""


class Stack:
    """Daemons by name, such as `worker-0`; their logs lie in `folder`."""

    def __init__(self, *, formers: int = 1, workers: int = 1, apis: int = 1, batchers: int = 0) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mtplx-stack-"))
        self.socket = self.folder / "redis.sock"
        self.redis_url = f"unix://{self.socket}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.counts: Mapping[Kind, int] = {"former": formers, "worker": workers, "api": apis, "batcher": batchers}
        self.ports = {f"api-{i}": free_port() for i in range(apis)}
        self.arguments: dict[Kind, Sequence[str]] = {"redis": (), "former": (), "worker": (), "api": (), "batcher": ()}
        """Further command line arguments by kind; set them before `start`."""
        self.held: set[str] = set()
        """Daemons that `restart_dead` leaves alone: somebody else starts them again."""
        self._hold = self.folder / "hold"
        """Holds scripted engines while it exists."""
        self.api_key = ""
        """One that the API knows, where it asks for one."""

    @property
    def url(self) -> str:
        """Where the first API process answers."""
        return self.url_of("api-0")

    def url_of(self, api: str) -> str:
        return f"http://127.0.0.1:{self.ports[api]}"

    def __enter__(self) -> Stack:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None and answers(self.redis_url):
                assert not (leaks := self.leaks()), f"keys never expire: {leaks}"
        finally:
            self.stop()

    def start(self) -> None:
        """Start everything and wait until every worker accepts and every API process answers."""
        self.start_one("redis")
        wait_until(lambda: answers(self.redis_url), "redis answers")
        for kind, count in self.counts.items():
            for index in range(count):
                self.start_one(f"{kind}-{index}")
        wait_until(self.is_ready, "the stack is ready", timeout_s=READY_S, on_timeout=self.logs)

    def start_one(self, name: str) -> None:
        """Start one daemon; its log is appended to, so that it survives restarts."""
        kind = name.partition("-")[0]
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                self._command(name, kind),  # type: ignore[arg-type]  # the part before the dash is a Kind
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=clean_environment(),
            )
        self.processes[name] = process

    def is_ready(self) -> bool:
        dead = [name for name, process in self.processes.items() if process.poll() is not None]
        if dead:
            raise RuntimeError(f"{dead} ended while starting\n{self.logs()}")
        return self.accepting_workers() >= self.counts["worker"] and all(map(self.api_answers, self.ports))

    def accepting_workers(self) -> int:
        with connection(self.redis_url) as client:
            ids = [raw.decode() for raw in client.smembers(keys.DAEMONS)]
            flags = [client.hmget(keys.daemon(daemon_id), "accepting", "dead") for daemon_id in ids]
        return sum(accepting == b"1" and dead is None for accepting, dead in flags)

    def configure_redis(self, **settings: int | str) -> None:
        """CONFIG SET on the running server."""
        with connection(self.redis_url) as client:
            for name, value in settings.items():
                client.config_set(name, value)

    def signal(self, name: str, number: int) -> None:
        self.processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        """kill -9, and wait until it is gone."""
        self.signal(name, signal.SIGKILL)
        self.processes[name].wait(PATIENCE_S)

    def restart_dead(self) -> list[str]:
        """Start again what has ended, as a supervisor does; returns which."""
        dead = [name for name, process in list(self.processes.items()) if process.poll() is not None]
        dead = [name for name in dead if name not in self.held]
        for name in dead:
            self.start_one(name)
        return dead

    @contextlib.contextmanager
    def supervised(self) -> Iterator[None]:
        """Whatever ends inside is started again."""
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(0.1):
                self.restart_dead()

        thread = threading.Thread(target=watch, name="stack-supervisor")
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    @contextlib.contextmanager
    def engines_held(self) -> Iterator[None]:
        """Let no scripted step end inside: rows that are taken stay taken, however slow the machine is."""
        self._hold.touch()
        try:
            yield
        finally:
            self._hold.unlink()

    def pid_of(self, daemon_id: str) -> int:
        """The process of a registered daemon."""
        with connection(self.redis_url) as client:
            return int(client.hget(keys.daemon(daemon_id), "pid"))

    def name_of(self, daemon_id: str) -> str:
        """The name, such as `worker-0`, of a registered daemon."""
        pid = self.pid_of(daemon_id)
        return next(name for name, process in self.processes.items() if process.pid == pid)

    def leaks(self) -> list[str]:
        """Keys that never expire and are not on the list of permanent ones."""
        with connection(self.redis_url) as client:
            names = [raw.decode() for raw in client.scan_iter(count=1000)]
            return [name for name in names if not keys.is_permanent(name) and client.ttl(name) == -1]

    def logs(self) -> str:
        """The end of every log."""
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            parts.append(f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-25:]))
        return "\n".join(parts)

    def stop(self) -> None:
        """End everything, Redis last, and remove the folder."""
        names = sorted(self.processes, key=lambda name: name == "redis")
        for name in names:
            self._end(self.processes[name])
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is not None:
            return
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(PATIENCE_S)

    def api_answers(self, api: str) -> bool:
        try:
            headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
            reply = httpx.get(f"{self.url_of(api)}/v1/models", headers=headers, timeout=10, verify=no_tls())
            return reply.status_code == 200
        except httpx.TransportError:
            return False

    def _command(self, name: str, kind: Kind) -> list[str]:
        if kind == "redis":
            return [*redis_command(self.folder, self.socket), *self.arguments["redis"]]
        verb = "batch-worker" if kind == "batcher" else kind
        command = [sys.executable, "-m", "mtplx", verb, "--redis", self.redis_url]
        if kind in ("api", "batcher"):
            command += ["--file-store", str(self.folder / "files")]
        if kind == "worker":
            command += ["--script-hold", str(self._hold)]
        if kind == "api":
            command += ["--port", str(self.ports[name])]
        return [*command, *self.arguments[kind]]


def redis_command(folder: Path, unix_socket: Path) -> list[str]:
    """A durable server on a unix socket: `redis-server` where there is one, else the embedded broker's binary."""
    binary = shutil.which("redis-server") or _embedded_binary()
    return [
        binary,
        *("--port", "0", "--unixsocket", str(unix_socket), "--dir", str(folder)),
        *("--appendonly", "yes", "--appendfsync", "always", "--save", "", "--maxmemory-policy", "noeviction"),
        *("--hash-max-listpack-value", "1024"),
    ]


def redis_process(folder: Path, *options: str) -> tuple[subprocess.Popen[bytes], str]:
    """A server of one's own that keeps nothing on disk, and its URL."""
    unix_socket = folder / "redis.sock"
    command = [*redis_command(folder, unix_socket), "--appendonly", "no", *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL), f"unix://{unix_socket}"


def answers(url: str) -> bool:
    """Whether a Redis answers there and has finished loading."""
    try:
        with connection(url) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


def connection(url: str) -> Any:
    """A synchronous client, as a context manager; redis-py's reply types do not tell sync from async."""
    return redis.Redis.from_url(url, socket_timeout=PATIENCE_S)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(
    is_true: Callable[[], bool],
    what: str,
    *,
    timeout_s: float = PATIENCE_S,
    on_timeout: Callable[[], str] = lambda: "",
) -> None:
    """Poll until something holds.

    Raises:
        TimeoutError: it did not, within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s} s: {what}\n{on_timeout()}")
        time.sleep(_POLL_S)


@cache
def no_tls() -> ssl.SSLContext:
    """Return the context of a client that meets no certificate; reading the system's takes longer than a call."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _embedded_binary() -> str:
    from broker.embedded.server import server_binary

    return str(server_binary())


def clean_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MTPLX_")}
    return {**kept, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
