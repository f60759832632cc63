"""A file of 200 MB and 50,000 lines through an API process and a batch worker of bounded memory. Engine: scripted."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from harness.stack import Stack
from tests.offline.batch_files import jsonl, line, wait_for

LINES = 50_000
SIZE = 200 * 1000 * 1000
ROOM_KB = 120_000
"""As much more than before may a process take: a few buffers, not a file."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "in.jsonl"
    filler = "x" * (SIZE // LINES - 200)
    with path.open("wb") as file:
        for number in range(LINES):
            file.write(jsonl([line(f"{number:06}", max_tokens=1, user=filler)]))
    return path


class Watch:
    """The most memory that some processes of a stack took while it ran."""

    def __init__(self, stack: Stack, *names: str) -> None:
        self._pids = {name: stack.processes[name].pid for name in names}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.before_kb = {name: resident_kb(pid) for name, pid in self._pids.items()}
        self.most_kb = dict(self.before_kb)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def grown_kb(self, name: str) -> int:
        return self.most_kb[name] - self.before_kb[name]

    def _look(self) -> None:
        while not self._done.wait(0.1):
            for name, pid in self._pids.items():
                self.most_kb[name] = max(self.most_kb[name], resident_kb(pid))


def resident_kb(pid: int) -> int:
    return int(subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True).stdout)


def test_large_file_is_taken_checked_run_and_given_back_in_bounded_memory(
    offline_stack: Stack, openai: OpenAI, large: Path
) -> None:
    size = large.stat().st_size
    with Watch(offline_stack, "api-0", "batcher-0") as watch:
        with large.open("rb") as file:
            uploaded = openai.files.create(file=("in.jsonl", file), purpose="batch")
        batch = openai.batches.create(input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h")
        running = wait_for(openai, batch, lambda each: bool(each.request_counts and each.request_counts.completed))
        openai.batches.cancel(batch.id)
        ended = wait_for(openai, batch)
        with httpx.stream("GET", f"{offline_stack.url}/v1/files/{uploaded.id}/content", timeout=60) as answer:
            came_back = sum(len(data) for data in answer.iter_raw())

    assert running.request_counts is not None
    assert running.request_counts.total == LINES
    assert ended.status == "cancelled"
    assert (uploaded.bytes, came_back) == (size, size)
    assert watch.grown_kb("api-0") < ROOM_KB
    assert watch.grown_kb("batcher-0") < ROOM_KB
