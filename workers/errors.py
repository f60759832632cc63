"""The errors of the workers room.

WorkerError
 ├── EngineFailedError   the engine or its thread can no longer be used; the supervisor starts this process anew
 ├── StalledError        rows are active and a step has not returned for `stall_s`
 └── LaneError           the lane cannot be served as configured
"""

from __future__ import annotations


class WorkerError(Exception):
    """Base of everything the workers room raises on purpose."""


class EngineFailedError(WorkerError):
    """The engine or its thread can no longer be used."""


class StalledError(WorkerError):
    """Rows are active and a step has not returned for `stall_s`."""


class LaneError(WorkerError):
    """The lane cannot be served as configured; the message names the option."""
