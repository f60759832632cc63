"""Daemons whose Redis is away, then a replica, then promoted: each says so once and goes on. Scripted engine."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from broker import keys
from harness.stack import answers, connection, free_port, redis_command, wait_until
from tests.console.processes import clean_environ

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {
    "the former": ("former",),
    "the worker": ("worker", "--engine", "scripted"),
    "the API": ("api",),
    "the batch worker": ("batch-worker",),
}


class Waiting:
    """The four daemons, and the Redis they wait for."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.url = f"unix://{folder / 'redis.sock'}"
        self._stack = stack
        self.processes = {who: self._start(who, words) for who, words in COMMANDS.items()}

    def start_redis(self, *words: str) -> None:
        self._run([*redis_command(self.folder, self.folder / "redis.sock"), *words], self.folder / "redis.log")
        wait_until(lambda: answers(self.url), "redis answers")

    def log(self, who: str) -> str:
        return (self.folder / f"{who}.log").read_text()

    def logs(self) -> str:
        return "\n".join(f"{who}: {self.log(who)}" for who in COMMANDS)

    def wait_until_all_say(self, words: str) -> None:
        wait_until(
            lambda: all(words in self.log(who) for who in COMMANDS), words, timeout_s=60, on_timeout=lambda: self.logs()
        )

    def _start(self, who: str, words: tuple[str, ...]) -> subprocess.Popen[bytes]:
        more: tuple[str, ...] = ("--port", str(free_port())) if words == ("api",) else ()
        more += ("--file-store", str(self.folder / "files")) if words[0] in ("api", "batch-worker") else ()
        command = [sys.executable, "-m", "mtplx", *words, *more, "--redis", self.url]
        return self._run(command, self.folder / f"{who}.log")

    def _run(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=self.folder, env=clean_environ() | {"PYTHONPATH": str(ROOT)}, stdout=file, stderr=file
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    with tempfile.TemporaryDirectory(prefix="mtplx-", dir="/tmp") as name, ExitStack() as stack:
        yield Waiting(Path(name), stack)


def test_daemons_wait_for_a_redis_that_is_away_and_then_a_replica_and_say_each_once(waiting: Waiting) -> None:
    waiting.wait_until_all_say("No such file or directory")
    waiting.start_redis("--replicaof", "127.0.0.1", str(free_port()))
    waiting.wait_until_all_say("it is a replica")
    with connection(waiting.url) as redis:
        redis.execute_command("REPLICAOF", "NO", "ONE")

        waiting.wait_until_all_say("goes on: Redis can be used")

        wait_until(lambda: redis.scard(keys.DAEMONS) == 3, "all have registered", timeout_s=60)
        wait_until(lambda: redis.scard(keys.BATCH_WORKERS) == 1, "and the batch worker", timeout_s=60)
    for who, process in waiting.processes.items():
        process.terminate()
        assert process.wait(30) == 0, waiting.log(who)
        assert waiting.log(who).count("No such file or directory") == 1
        assert waiting.log(who).count("it is a replica") == 1
        assert "Traceback" not in waiting.log(who)


def test_daemon_that_waits_ends_in_order_when_it_is_told_to(waiting: Waiting) -> None:
    waiting.wait_until_all_say("waits: Redis cannot be used")

    for process in waiting.processes.values():
        process.terminate()

    assert {who: process.wait(30) for who, process in waiting.processes.items()} == dict.fromkeys(COMMANDS, 0)
