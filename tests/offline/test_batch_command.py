"""`mtplx batch` against a server, as processes. Engine: scripted, in a process of its own."""

from __future__ import annotations

import codecs
import json
import subprocess
from pathlib import Path

from console.supervisor import mtplx_command
from harness.stack import Stack, clean_environment
from tests.offline.batch_files import jsonl, line


def batch(stack: Stack, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*mtplx_command("batch"), *words, "--server", stack.url],
        capture_output=True,
        text=True,
        env={**clean_environment(), "http_proxy": "http://127.0.0.1:9", "all_proxy": "http://127.0.0.1:9"},
        timeout=180,
    )


def test_batch_is_submitted_waited_for_and_fetched(offline_stack: Stack, tmp_path: Path) -> None:
    lines = jsonl([line("a"), line("b"), line("bad", temperature=9)])
    (tmp_path / "in.jsonl").write_bytes(codecs.BOM_UTF8 + lines)  # its endpoint is found behind the mark

    batch_id = batch(offline_stack, "submit", str(tmp_path / "in.jsonl")).stdout.strip()
    waited = batch(offline_stack, "wait", batch_id)
    files = ("-o", str(tmp_path / "out"), "--errors", str(tmp_path / "err"))
    fetched = batch(offline_stack, "fetch", batch_id, *files)

    assert waited.returncode == 1, "one line failed"
    assert f"{batch_id}  completed  2 of 3 answered, 1 failed" in waited.stdout
    assert fetched.returncode == 0
    assert [len((tmp_path / name).read_text().splitlines()) for name in ("out", "err")] == [2, 1]


def test_status_shows_what_is_wrong_with_a_file(offline_stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(jsonl([line("a"), line("a")]))
    batch_id = batch(offline_stack, "submit", str(tmp_path / "in.jsonl")).stdout.strip()
    batch(offline_stack, "wait", batch_id)

    shown = batch(offline_stack, "status", batch_id)
    as_json = batch(offline_stack, "status", batch_id, "--json")

    assert "failed" in shown.stdout
    assert "line 2: custom_id 'a' was used before, in line 1." in shown.stdout
    assert json.loads(as_json.stdout)["errors"]["data"][0]["code"] == "duplicate_custom_id"


def test_cancel_of_an_ended_batch_says_why_not(offline_stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(jsonl([line("a")]))
    batch_id = batch(offline_stack, "submit", str(tmp_path / "in.jsonl")).stdout.strip()
    batch(offline_stack, "wait", batch_id)

    refused = batch(offline_stack, "cancel", batch_id)

    assert refused.returncode == 1
    assert "completed" in refused.stderr


def test_server_that_is_not_there_is_named() -> None:
    done = subprocess.run(
        [*mtplx_command("batch"), "status", "--server", "http://127.0.0.1:9"],
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=60,
    )

    assert done.returncode == 1
    assert "http://127.0.0.1:9 cannot be reached" in done.stderr
