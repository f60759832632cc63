"""`mtplx up` in folders with odd names and where macOS keeps data, without what only Linux offers.

Real processes on the scripted engine, from a chat to a batch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from broker.embedded import guard
from broker.embedded.server import default_data_dir
from harness.stack import free_port, wait_until
from tests.console.processes import clean_environ

ROOT = Path(__file__).resolve().parents[2]
READY_S = 90.0
WITHOUT_LINUX = """
import os, select, signal, sys

for module, names in (
    (os, "sched_getaffinity sched_setaffinity pidfd_open posix_fallocate posix_fadvise fdatasync getrandom eventfd "
         "memfd_create pipe2 copy_file_range splice setns unshare getxattr setxattr listxattr removexattr accept4"),
    (select, "epoll"),
    (signal, "pidfd_send_signal sigtimedwait sigwaitinfo"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

def refuse(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(arguments[0])

sys.addaudithook(refuse)
"""
"""A sitecustomize module: takes away what macOS does not have."""


class UpAtHome:
    """A running `mtplx up` of a user with this home."""

    def __init__(self, home: Path, *words: str) -> None:
        self.home = home
        self.words = words
        (home / "python").mkdir(parents=True)
        (home / "python" / "sitecustomize.py").write_text(WITHOUT_LINUX)
        self.environ: Mapping[str, str] = clean_environ() | {
            "HOME": str(home),
            "PYTHONPATH": f"{home / 'python'}:{ROOT}",
        }
        self.port = free_port()
        with (home / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [*self.command("up"), "--engine", "scripted", "--port", str(self.port)],
                cwd=home,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stderr=log,
            )

    @property
    def log(self) -> str:
        return (self.home / "log").read_text()

    def command(self, *names: str) -> list[str]:
        return [sys.executable, "-m", "mtplx", *names, *self.words]

    def mtplx(self, *names: str) -> str:
        """Run one command to its end; what it prints."""
        command = self.command(*names)
        done = subprocess.run(command, cwd=self.home, env=self.environ, capture_output=True, text=True, timeout=READY_S)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture(params=["default of this system", "default of macOS"])
def up(request: pytest.FixtureRequest) -> Iterator[UpAtHome]:
    with tempfile.TemporaryDirectory(prefix="mtplx-", dir="/tmp") as name:
        home = Path(name) / "Ünï côde & spaces = fun"
        words = ("--data-dir", str(default_data_dir(home=home, platform="darwin")))
        started = UpAtHome(home, *(words if request.param == "default of macOS" else ()))
        try:
            wait_until(lambda: "ready at " in started.log, "up", timeout_s=READY_S, on_timeout=lambda: started.log)
            yield started
        finally:
            started.process.terminate()
            started.process.wait(60)


def test_up_runs_chats_and_batches_in_a_home_of_any_name_without_what_only_linux_offers(up: UpAtHome) -> None:
    url = f"http://127.0.0.1:{up.port}"
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    call = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (up.home / "calls.jsonl").write_text(json.dumps(call) + "\n")

    chat = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)
    batch_id = up.mtplx("batch", "submit", "calls.jsonl")
    waited = up.mtplx("batch", "wait", batch_id)
    daemons = {each["kind"] for each in json.loads(up.mtplx("status", "--json"))["daemons"]}

    assert chat.status_code == 200
    assert f"{batch_id}  completed  1 of 1 answered" in waited
    assert daemons == {"api", "former", "batch-worker"}
    assert "starting it again" not in up.log
    assert "Traceback" not in up.log


@pytest.mark.parametrize(("command", "status"), [("true", 0), ("false", 1)])
def test_guard_runs_a_command_on_macos(command: str, status: int) -> None:
    path = str(Path(guard.__file__))
    code = f"""
import ctypes, runpy, sys
sys.platform, ctypes.CDLL, sys.argv = "darwin", None, [{path!r}, "0", {command!r}]
runpy.run_path({path!r}, run_name="__main__")
"""
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdin=subprocess.PIPE) as process:
        assert process.wait(30) == status
