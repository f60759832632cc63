"""File descriptors of an API process: each stream takes one, and systems start programs with as few as 256."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

WANTED = 65_536
FALLBACK = 10_240
"""The most that macOS grants where it names no limit."""


def allow_many_connections() -> int:
    """Raise the soft limit of open files as far as is wanted and allowed; returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (WANTED, FALLBACK):
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft == resource.RLIM_INFINITY or soft >= limit:
            return soft
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        except (ValueError, OSError):
            continue
        return limit
    logger.warning("no more than %d connections can be open at once: the limit of open files cannot be raised", soft)
    return soft
