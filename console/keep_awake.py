"""Keeps a Mac from sleeping while this process lives; elsewhere there is nothing to do."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)


def keep_awake(
    *, platform: str = sys.platform, start: Callable[[Sequence[str]], object] | None = None
) -> Sequence[str] | None:
    """Start the system's own tool beside us; it ends when we do, however that happens. Returns its command.

    Args:
        start: starts a command without waiting for it.
    """
    if platform != "darwin":
        return None
    command = ["/usr/bin/caffeinate", "-i", "-s", "-w", str(os.getpid())]
    try:
        (start or _start)(command)
    except OSError as error:
        logger.warning("this Mac may fall asleep while it decodes: %s", error)
    return command


def _start(command: Sequence[str]) -> None:
    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
