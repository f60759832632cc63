"""What a Redis keeps over a crash, in words: read off its settings by a pure function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Policy = Literal["always", "everysec", "no", "snapshots", "none", "unknown"]


@dataclass(frozen=True, slots=True)
class Persistence:
    """How a server persists, what that means, and what to do about it."""

    policy: Policy
    means: str
    advice: str = ""


ADVISED = "redis-cli CONFIG SET appendonly yes; redis-cli CONFIG SET appendfsync always; then put both into redis.conf"

_FSYNC = {
    "always": Persistence(
        "always", "an accepted request survives kill -9 and, as far as the disk honours fsync, power loss"
    ),
    "everysec": Persistence(
        "everysec",
        "a clean restart loses nothing; a crash may undo the last second or two: that runs again or ends with an error",
        "for requests that must survive a crash: redis-cli CONFIG SET appendfsync always",
    ),
    "no": Persistence("no", "a crash may undo what the system had not written, often half a minute", ADVISED),
}


def judge_persistence(config: Mapping[str, str]) -> Persistence:
    """From `CONFIG GET appendonly appendfsync save`; empty where the server does not tell."""
    if "appendonly" not in config:
        return Persistence("unknown", "the server does not tell (CONFIG is not allowed)", "ask whoever runs it")
    if config["appendonly"] == "yes":
        return _FSYNC.get(config.get("appendfsync", ""), _FSYNC["everysec"])
    if config.get("save"):
        return Persistence("snapshots", "a crash undoes everything since the last snapshot", ADVISED)
    return Persistence("none", "every restart loses all that was accepted", ADVISED)
