"""The errors of the engine room.

EngineError
 ├── ModelLoadError        a folder or hub id that cannot be loaded, or a model that no engine here can run
 ├── UnsupportedModeError  a scheduler mode that this build or this model cannot run
 ├── RowRejectedError      a row that breaks the lane's bounds; nothing was allocated for it
 ├── EngineDeadError       a step failed in a way that leaves the engine unusable
 ├── LaneIsolationError    the MTP lane called the AR service
 └── ForgeError            a head cannot be made from what is there
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything the engine room raises on purpose."""


class ModelLoadError(EngineError):
    """A model could not be loaded, or is of a kind that cannot be run here."""


class UnsupportedModeError(EngineError):
    """This scheduler mode cannot run with this build or this model."""


class RowRejectedError(EngineError):
    """A row breaks the lane's bounds; nothing was allocated for it."""


class EngineDeadError(EngineError):
    """A step failed and the engine can no longer be used; its rows are lost to this process."""


class LaneIsolationError(EngineError):
    """The MTP lane called the AR service, which it must never do."""


class ForgeError(EngineError):
    """A head cannot be collected for, trained or verified from what is there."""
