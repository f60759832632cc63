"""Keeps the MTP lane and the AR service apart: while the MTP lane steps, calling the AR service raises.

Depth 0 is the MTP lane's own step; falling back to the AR engine from within it would be a second way to decode,
chosen by nobody. Imports no MLX.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from mtplx_core.errors import LaneIsolationError

_is_inside: ContextVar[bool] = ContextVar("inside_mtp_lane", default=False)


@contextmanager
def inside_mtp_lane() -> Iterator[None]:
    """Mark everything called in the block as called by the MTP lane."""
    token = _is_inside.set(True)
    try:
        yield
    finally:
        _is_inside.reset(token)


def refuse_inside_mtp_lane(what: str) -> None:
    """To be called first by everything that belongs to the AR service.

    Raises:
        LaneIsolationError: the MTP lane is calling.
    """
    if _is_inside.get():
        raise LaneIsolationError(f"the MTP lane called {what}, which belongs to the AR service")
