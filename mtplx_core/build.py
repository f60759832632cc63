"""Chooses the engine of a lane from scheduler mode, numerics profile and model. The only place that knows them all.

A mode is chosen only where its engine says what the model says; the self-test of `mtplx_core.models` has that word.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mtplx_core.engine import Engine, Geometry, Profile, SchedulerMode
from mtplx_core.engines.ar_batch import ArBatchEngine
from mtplx_core.engines.serial import SerialEngine
from mtplx_core.errors import UnsupportedModeError
from mtplx_core.heads.base import Head
from mtplx_core.models import self_test
from mtplx_core.models.loader import LoadedModel
from mtplx_core.models.memory import fit_geometry
from mtplx_core.mtp.assemble import build_mtp_engine
from mtplx_core.mtp.depth import FixedDepth
from mtplx_core.mtp.engine import MtpBatchEngine, MtpOptions

logger = logging.getLogger(__name__)

FALLBACKS = (SchedulerMode.MTP_BATCH, SchedulerMode.AR_BATCH, SchedulerMode.SERIAL)
"""Each mode carries more families than the one before it."""


class ModeChoice(NamedTuple):
    """The mode that a model runs in."""

    mode: SchedulerMode
    refusals: Mapping[SchedulerMode, str]
    """Why each mode that would have come first is not the one."""


def choose_mode(
    loaded: LoadedModel, modes: Sequence[SchedulerMode] = FALLBACKS, *, profile: Profile = Profile.BALANCED
) -> ModeChoice:
    """Take the first mode whose engine passes the self-test on this model, on the thread that loaded the model.

    Raises:
        UnsupportedModeError: none of them does.
    """
    refusals: dict[SchedulerMode, str] = {}
    for mode in modes:
        if reason := mode_refusal(mode, loaded, profile=profile):
            logger.warning("%s does not run on %s: %s", loaded.name, mode, reason)
            refusals[mode] = reason
        else:
            return ModeChoice(mode, refusals)
    reasons = "; ".join(f"{mode}: {reason}" for mode, reason in refusals.items())
    raise UnsupportedModeError(f"{loaded.name} runs in no scheduler mode here ({reasons})")


def mode_refusal(mode: SchedulerMode, loaded: LoadedModel, *, profile: Profile = Profile.BALANCED) -> str:
    """Why a mode cannot run this model; empty where its engine passes the self-test."""
    geometry = Geometry(
        self_test.ROWS,
        max_context_tokens=min(self_test.CONTEXT_TOKENS, loaded.max_context),
        depth=self_test.DEPTH,
        prefill_chunk_tokens=self_test.CHUNK_TOKENS,
    )
    try:
        engine = _engine_to_test(mode, loaded, geometry, profile)
    except UnsupportedModeError as error:
        return str(error)
    except Exception as error:  # a family laid out in a way that an engine does not know may fail in any way
        logger.info("the engine cannot be built", exc_info=True)
        return f"its engine cannot be built ({type(error).__name__}: {error})"
    return self_test.refusal(engine, loaded)


def _engine_to_test(mode: SchedulerMode, loaded: LoadedModel, geometry: Geometry, profile: Profile) -> Engine:
    """The lane's engine with a depth that does not wait for a price, so that it verifies several positions at once."""
    if mode is SchedulerMode.MTP_BATCH and profile is Profile.BALANCED:
        return MtpBatchEngine(loaded, geometry, options=MtpOptions(policy=FixedDepth(geometry.depth)))
    return build_engine(mode, loaded, geometry=geometry, profile=profile)


def build_engine(
    mode: SchedulerMode,
    loaded: LoadedModel,
    *,
    geometry: Geometry,
    profile: Profile = Profile.BALANCED,
    head: Head | None = None,
    probe_dir: Path | None = None,
    memory_bytes: int = 0,
) -> Engine:
    """Make the engine on the thread that loaded the model.

    The engine's own `geometry` may be narrower than the one asked for: the serial lane has one row, and no lane
    holds more tokens than the model was made for.

    Args:
        head: drafts tokens on the MTP lane; without one it drafts from the row's own text. Other lanes ignore it.
        memory_bytes: what the caches of all rows may take; the lane is narrowed to it. 0: no bound.
        probe_dir: where the MTP lane keeps what forwards cost on this machine; None measures nothing at start.

    Raises:
        UnsupportedModeError: this mode or profile cannot run here.
    """
    if geometry.max_context_tokens > loaded.max_context:
        logger.info("%s holds %d tokens at most, the lane is narrowed to that", loaded.name, loaded.max_context)
        geometry = replace(geometry, max_context_tokens=loaded.max_context)
    if memory_bytes:
        asked = build_engine(mode, loaded, geometry=geometry, profile=profile, head=head)
        geometry = fit_geometry(asked.geometry, memory_bytes=memory_bytes, row_bytes=asked.row_bytes)
        if geometry != asked.geometry:
            logger.warning("memory carries %d rows of %d tokens, the lane is narrowed to that",
                           geometry.decode_batch_max, geometry.max_context_tokens)  # fmt: skip
    match mode, profile:
        case SchedulerMode.SERIAL, _:
            return SerialEngine(loaded, replace(geometry, decode_batch_max=1, depth=0))
        case SchedulerMode.AR_BATCH, Profile.BALANCED:
            return ArBatchEngine(loaded, replace(geometry, depth=0))
        case SchedulerMode.AR_BATCH, Profile.B1_EXACT:
            # Several rows in turn, each decoded alone.
            return SerialEngine(loaded, replace(geometry, depth=0), replays_committed=True)
        case SchedulerMode.MTP_BATCH, _:
            return build_mtp_engine(loaded, geometry, profile=profile, head=head, probe_dir=probe_dir)
    raise UnsupportedModeError(f"no engine for mode {mode} and profile {profile}")
