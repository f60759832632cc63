"""Runs one command and ends it when standard input closes, that is when whoever started this guard is gone.

For programs that cannot watch their parent themselves, such as the Redis server. Run by its path, in isolated mode:
it imports the standard library only. Standard input is a pipe whose other end only the parent holds. The first
argument is how many seconds the command may linger once the pipe is closed, the others are the command.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys

GRACE_S = 10.0
PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(linger_s: float, command: list[str]) -> int:
    """The command's exit status, or 128 and the signal's number."""
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    for number in (*STOP_SIGNALS, signal.SIGCHLD):
        signal.signal(number, _note)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_guard)
    if not _is_told_to_stop(child, [sys.stdin.fileno(), woken], woken, timeout_s=None):
        _is_told_to_stop(child, [woken], woken, timeout_s=linger_s)
    _end(child)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _is_told_to_stop(
    child: subprocess.Popen[bytes], watched: list[int], woken: int, *, timeout_s: float | None
) -> bool:
    """Wait for the end of the child or a signal to stop; False when the pipe closed or the time is over."""
    while child.poll() is None:
        readable, _, _ = select.select(watched, [], [], timeout_s)
        if woken not in readable:
            return False
        if set(os.read(woken, 64)) & set(STOP_SIGNALS):
            return True
    return True


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _note(number: int, frame: object) -> None:
    """The wakeup descriptor has carried the signal; a handler must merely exist."""


def _die_with_guard() -> None:
    # Covers kill -9 of the guard itself, where the kernel offers it; elsewhere the next start takes the orphan over.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
