"""Processes as the tests of this folder start and watch them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that is dead but not yet reaped by its new parent does not."""
    return subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True).stdout.strip()[:1] not in {
        b"",
        b"Z",
    }


def are_gone(pids: Iterable[int]) -> bool:
    """Whether none of the processes runs any more."""
    return not any(is_alive(pid) for pid in pids)


def children_of(pid: int) -> list[int]:
    """Direct and further descendants, as far as they run."""
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in table.splitlines()]
    found = [pid]
    for parent in found:
        found.extend(int(child) for child, of, stat in rows if int(of) == parent and not stat.startswith("Z"))
    return found[1:]


def command_of(pid: int) -> str:
    """Its command line; empty when it does not run."""
    # -ww: COLUMNS in the environment would cut it otherwise.
    return subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()


def clean_environ() -> dict[str, str]:
    """This process's environment without any option of ours."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MTPLX_")}
