"""`mtplx up` as a person runs it: real broker, former, worker and API processes. Runs on the scripted engine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from console.supervisor import EXIT_CONFIG
from harness.stack import free_port, wait_until
from tests.console.processes import are_gone, children_of, clean_environ, command_of

ROOT = Path(__file__).resolve().parents[2]
READY_S = 60.0
DEAD_PROXIES = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
"""Nothing in `mtplx up` may ask a proxy for this machine."""


def mtplx(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, in a folder that holds nothing."""
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            [sys.executable, "-m", "mtplx", *words],
            cwd=folder,
            env=clean_environ() | {"PYTHONPATH": str(ROOT)} | environ,
            capture_output=True,
            text=True,
            timeout=READY_S,
        )


class Up:
    """A running `mtplx up`."""

    def __init__(self, data_dir: Path, *words: str) -> None:
        self.data_dir = data_dir
        self.log_path = data_dir.parent / f"{data_dir.name}.log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "mtplx", "up", "--engine", "scripted", "--port", str(self.port)]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--data-dir", str(data_dir), *words],
                cwd=data_dir.parent,
                env=clean_environ() | {"PYTHONPATH": str(ROOT)} | DEAD_PROXIES,
                stdin=subprocess.DEVNULL,
                stderr=log,
            )

    def wait_ready(self) -> None:
        wait_until(
            lambda: f"ready at {self.url}" in self.log, "up is ready", timeout_s=READY_S, on_timeout=lambda: self.log
        )

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def child(self, words: str) -> int:
        """The child whose command line holds these words."""
        return next(pid for pid in children_of(self.process.pid) if words in command_of(pid))

    def chat(self) -> dict[str, Any]:
        body = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        reply = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=30)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def end(self) -> None:
        """In order, so that nothing writes into the folder any more when it is removed."""
        self.process.terminate()
        self.process.wait(60)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mtplx-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def up(folder: Path) -> Iterator[Up]:
    started = Up(folder / "data")
    try:
        started.wait_ready()
        yield started
    finally:
        started.end()


@pytest.fixture(scope="module")
def shared_up() -> Iterator[Up]:
    """For tests that leave it as it is; other machines may join it."""
    with tempfile.TemporaryDirectory(prefix="mtplx-", dir="/tmp") as name:
        started = Up(Path(name) / "data", "--share", "--share-host", "127.0.0.1", "--share-port", str(free_port()))
        try:
            started.wait_ready()
            yield started
        finally:
            started.end()


def test_up_answers_a_chat(shared_up: Up) -> None:
    assert shared_up.chat()["usage"]["completion_tokens"] == 4


def test_up_refuses_a_data_directory_in_use(shared_up: Up) -> None:
    second = mtplx("up", "--engine", "scripted", "--port", "0", "--data-dir", str(shared_up.data_dir))

    assert second.returncode == EXIT_CONFIG
    assert "in use by another mtplx up" in second.stderr


def test_up_refuses_a_port_in_use(shared_up: Up, folder: Path) -> None:
    second = mtplx("up", "--engine", "scripted", "--port", str(shared_up.port), "--data-dir", str(folder))

    assert second.returncode == EXIT_CONFIG
    assert f"127.0.0.1:{shared_up.port}" in second.stderr
    assert "Address already in use" in second.stderr


def test_up_refuses_to_share_a_redis_that_is_not_its_own(folder: Path) -> None:
    refused = mtplx("up", "--share", "--redis", "redis://elsewhere", "--data-dir", str(folder))

    assert refused.returncode == EXIT_CONFIG
    assert "only the embedded broker can be shared" in refused.stderr


def test_status_shows_the_running_system_as_json(shared_up: Up) -> None:
    reply = mtplx("status", "--json", "--data-dir", str(shared_up.data_dir))

    status = json.loads(reply.stdout)
    assert [lane["mode"] for lane in status["lanes"]] == ["ar_batch"]
    assert {daemon["kind"] for daemon in status["daemons"]} == {"api", "former", "batch-worker"}
    assert status["server"]["persistence"]["policy"] == "always"
    assert ":***@" in status["server"]["url"]


def test_status_names_the_persistence_policy_to_a_person(shared_up: Up) -> None:
    assert "persistence always" in mtplx("status", "--data-dir", str(shared_up.data_dir)).stdout


def test_doctor_finds_no_problem_with_a_running_system(shared_up: Up) -> None:
    reply = mtplx("doctor", "--json", "--data-dir", str(shared_up.data_dir), "--port", str(shared_up.port))

    assert reply.returncode == 0, reply.stdout
    assert {"redis", "persistence", "former", "worker", "api"} <= {each["about"] for each in json.loads(reply.stdout)}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_leaves_no_process_and_no_socket_when_it_is_stopped(up: Up, number: signal.Signals) -> None:
    children = children_of(up.process.pid)

    up.process.send_signal(number)

    assert up.process.wait(30) == 0
    assert children
    assert are_gone(children)
    assert not (up.data_dir / "broker.sock").exists()
    assert not (up.data_dir / "runtime.json").exists()


def test_up_leaves_no_process_when_it_is_killed_and_can_be_started_again(up: Up, folder: Path) -> None:
    children = children_of(up.process.pid)

    up.process.kill()

    again = Up(folder / "data")
    try:
        wait_until(lambda: are_gone(children), "all children are gone")
        again.wait_ready()
        assert again.chat()["object"] == "chat.completion"
    finally:
        again.end()


def test_up_starts_killed_daemons_again(up: Up) -> None:
    killed = [up.child(f"mtplx {daemon} --with-parent") for daemon in ("worker", "former", "api")]

    for pid in killed:
        os.kill(pid, signal.SIGKILL)

    wait_until(lambda: up.log.count("starting it again") == 3, "up noticed")
    wait_until(up.is_healthy, "everything is healthy again", timeout_s=READY_S)
    assert up.chat()["object"] == "chat.completion"


def test_up_starts_a_killed_broker_again_and_loses_nothing(up: Up) -> None:
    up.chat()

    os.kill(up.child("valkey-server unixsocket:"), signal.SIGKILL)

    wait_until(lambda: "broker ended" in up.log, "up noticed")
    wait_until(up.is_healthy, "everything is healthy again", timeout_s=READY_S)
    up.chat()
    ended = json.loads(mtplx("status", "--json", "--data-dir", str(up.data_dir)).stdout)["queue"]["ended"]
    assert sum(ended.values()) == 2


def test_up_gives_up_at_once_when_a_daemon_refuses_its_settings(folder: Path) -> None:
    reply = mtplx("up", "--engine", "scripted", "--host", "0.0.0.0", "--port", "0", "--data-dir", str(folder / "data"))

    assert reply.returncode == 1
    assert "without keys" in reply.stderr
    assert "api ended with status 2" in reply.stderr


def test_up_runs_no_broker_of_its_own_when_redis_is_named(shared_up: Up, folder: Path) -> None:
    runtime = json.loads((shared_up.data_dir / "runtime.json").read_text())
    guest = Up(folder / "data", "--redis", runtime["redis_url"], "--workers", "2")
    try:
        guest.wait_ready()
        commands = [command_of(pid) for pid in children_of(guest.process.pid)]
        assert sum("mtplx worker" in command for command in commands) == 2
        assert not any("valkey" in command for command in commands)
        assert not guest.data_dir.exists()
    finally:
        guest.process.send_signal(signal.SIGTERM)
        guest.process.wait(30)


def test_up_prints_a_join_command_that_works_when_it_shares(shared_up: Up) -> None:
    found = re.search(r"MTPLX_REDIS='(\S+)' (\S+) worker$", shared_up.log, re.MULTILINE)

    assert found is not None
    assert found[2] == ".venv/bin/mtplx"  # what `make install` leaves in its folder
    with redis.Redis.from_url(found[1]) as guest:
        assert guest.ping()
