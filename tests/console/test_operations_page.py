"""Runs every `sh` block of docs/operations.md, from top to bottom, on a real `redis-server` with the page's ACL user.

The scripted engine decodes. Ports and names of the page are replaced by free ones of this machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from broker import keys
from broker.connection.rights import acl_rules
from harness.stack import answers, connection, free_port, wait_until
from tests.console.processes import clean_environ

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
TOOLS = ("redis-server", "redis-cli", "openssl", "curl", "bash")
WRAPPER = """#!/bin/bash
# Daemons go to the background, as a supervisor would have them.
case "$1" in
  worker) set -- "$@" --engine scripted ;;
  api) set -- "$@" --port {port} ;;
  former|batch-worker) ;;
  *) exec {python} -m mtplx "$@" ;;
esac
{python} -m mtplx "$@" > "$1.log" 2>&1 < /dev/null &
echo $! >> pids
"""


BEYOND_THE_PAGE = """
api=http://localhost:8000
auth="Authorization: Bearer $MTPLX_API_KEY"
json="Content-Type: application/json"
body='{"model": "MODEL", "prompt": "Hello", "max_tokens": 8, "logprobs": 2}'
curl -sf -H "$auth" -H "$json" -H "Idempotency-Key: a" -d "$body" $api/v1/completions
curl -sf -H "$auth" -H "$json" -H "Idempotency-Key: a" -d "$body" $api/v1/completions
curl -sf -H "$auth" $api/v1/files > files.json
curl -sf -H "$auth" $api/metrics > metrics.txt
curl -sf -X DELETE -H "$auth" "$api/v1/files/$(grep -o 'file-[0-9a-z-]*' files.json | head -1)"
mtplx batch submit calls.jsonl --server $api > second.id
mtplx batch cancel "$(cat second.id)" --server $api || true
mtplx batch status --server $api
mtplx dead list
printf '"Hello"\\n' > prompts.jsonl
mtplx run prompts.jsonl -o out.jsonl
mtplx status --json
kill -9 $(sed -n 2p pids)
"""
"""What else the daemons do: choices by key, files, quotas, runs, and at the end a worker that dies."""


class Operator:
    """A person who types the page's blocks into one shell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {port: str(free_port()) for port in ("6379", "6380", "8000")}
        (folder / "bin").mkdir()
        wrapper = folder / "bin" / "mtplx"
        wrapper.write_text(WRAPPER.format(python=sys.executable, port=self.ports["8000"]))
        wrapper.chmod(0o755)
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        self._environ = clean_environ() | {"PATH": path, "PYTHONPATH": str(ROOT)}

    def type(self, block: str) -> None:
        """Run a block; what it exports is there in the next one."""
        for port, free in self.ports.items():
            block = block.replace(port, free)
        block = block.replace("@queue:", "@127.0.0.1:").replace('"MODEL"', '"scripted"')
        script = f"set -eo pipefail\n{block}\nenv -0 > environ\n"
        with (self.folder / "shell.log").open("wb") as log:
            done = subprocess.run(
                ["bash", "-c", script], cwd=self.folder, env=self._environ, stdout=log, stderr=log, timeout=120
            )
        assert done.returncode == 0, f"{block}\n{(self.folder / 'shell.log').read_text()}\n{self.logs()}"
        pairs = (self.folder / "environ").read_text().rstrip("\0").split("\0")
        self._environ = dict(pair.split("=", 1) for pair in pairs)

    @property
    def admin_url(self) -> str:
        return f"redis://:{self._environ['REDISCLI_AUTH']}@127.0.0.1:{self.ports['6379']}"

    def is_serving(self) -> bool:
        """Whether every daemon that was started is at work."""
        if not answers(self.admin_url):
            return False
        with connection(self.admin_url) as admin:
            ids = [raw.decode() for raw in admin.smembers(keys.DAEMONS)]
            has_worker = any(admin.hget(keys.daemon(each), "accepting") == b"1" for each in ids)
            return has_worker and len(ids) >= 3 and admin.scard(keys.BATCH_WORKERS) == 1

    def has_no_worker(self) -> bool:
        """Whether the former has taken over from the worker."""
        with connection(self.admin_url) as admin:
            ids = [raw.decode() for raw in admin.smembers(keys.DAEMONS)]
            return not any(admin.hget(keys.daemon(each), "kind") == b"worker" for each in ids)

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in self.folder.glob("**/*.log"))

    def end(self) -> None:
        pids = (self.folder / "pids").read_text().split() if (self.folder / "pids").exists() else []
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        with suppress(Exception), connection(self.admin_url) as admin:
            admin.shutdown(nosave=True)


@pytest.fixture
def operator() -> Iterator[Operator]:
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"not on this machine: {missing}")
    with tempfile.TemporaryDirectory(prefix="mtplx-", dir="/tmp") as name:
        operator = Operator(Path(name))
        yield operator
        operator.end()


def test_every_block_of_the_page_runs_and_the_user_of_the_page_lacks_no_right(operator: Operator) -> None:
    for block in BLOCKS:
        operator.type(block)
        if "mtplx former" in block or "cp -a backup" in block:
            wait_until(operator.is_serving, "all daemons are at work", timeout_s=60, on_timeout=operator.logs)

    operator.type(BEYOND_THE_PAGE)
    wait_until(operator.has_no_worker, "the dead worker was noticed", timeout_s=60, on_timeout=operator.logs)
    (answer,) = [json.loads(line) for line in (operator.folder / "answers.jsonl").read_text().splitlines()]
    assert (answer["custom_id"], answer["response"]["status_code"]) == ("one", 200)
    with connection(operator.admin_url) as admin:
        denied = {entry["object"].lower() for entry in admin.acl_log()}
    assert denied <= {"client|setinfo", "config|get"}, denied  # both may be refused
    assert "Traceback" not in operator.logs()
    findings = {each["about"]: each["level"] for each in json.loads((operator.folder / "findings.json").read_text())}
    assert {findings[each] for each in ("redis", "former", "worker", "batch worker")} == {"ok"}


def test_page_gives_exactly_the_rights_that_are_needed() -> None:
    (line,) = re.findall(r"^user mtplx on >\S+ (.*)$", PAGE, flags=re.MULTILINE)

    assert line.split() == acl_rules()


def test_rights_include_every_command_of_the_scripts() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "broker" / "lua").glob("*.lua"))
    used = {f"+{name.lower()}" for name in re.findall(r"redis\.p?call\('([A-Za-z]+)'", sources)}

    assert used - set(acl_rules()) == set()
    assert len(used) > 20


def test_page_has_no_block_that_is_neither_run_nor_marked() -> None:
    marks = set(re.findall(r"^```(\w*)$", PAGE, flags=re.MULTILINE))

    assert marks <= {"", "sh", "console"}
    assert len(re.findall(r"^```", PAGE, flags=re.MULTILINE)) % 2 == 0
    assert len(BLOCKS) >= 8
