"""What becomes of a family: the mode its lane runs in, why not a better one, and whether its answers are exact."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlx_lm.models.cache import make_prompt_cache

from harness.families.checkpoints import write_checkpoint
from harness.families.trial import GEOMETRY, judge, run_rows
from mtplx_core.build import build_engine, choose_mode
from mtplx_core.engine import Engine, SchedulerMode
from mtplx_core.errors import ModelLoadError, UnsupportedModeError
from mtplx_core.loader import LoadedModel, load_model

_REASONS = re.compile(r"(mtp_batch|ar_batch|serial): (.*?)(?=; (?:mtp_batch|ar_batch|serial): |\)$)")
"""Of the sentence that says why no mode runs a model."""
_MEMORY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Outcome:
    """One family's."""

    family: str
    caches: str = ""
    """Kinds of caches that mlx-lm makes for it, each with its count."""
    mode: SchedulerMode | None = None
    """None: no mode runs it."""
    refusals: Mapping[str, str] | None = None
    """Why each better mode is not the one, by mode; under "load" why it cannot be loaded."""
    failures: tuple[str, ...] = ()
    """What is wrong with the answers of the chosen engine; nothing, where all is well."""


def outcome_of(family: str, folder: Path) -> Outcome:
    """Write the family's checkpoint into `folder`, serve it as a worker would, and judge the answers."""
    try:
        loaded = load_model(write_checkpoint(folder, family))
    except ModelLoadError as error:
        return Outcome(family, refusals={"load": str(error)})
    caches = caches_of(loaded)
    try:
        mode, refusals = chosen_mode(loaded)
    except UnsupportedModeError as error:
        return Outcome(family, caches, refusals=dict(_REASONS.findall(str(error))))
    verdict = judge(loaded, run_rows(engine_of(mode, loaded)))
    return Outcome(family, caches, mode, refusals, verdict.failures)


def chosen_mode(loaded: LoadedModel) -> tuple[SchedulerMode, Mapping[str, str]]:
    """Return the mode a worker without a configured one takes, and why not the ones before it.

    Raises:
        UnsupportedModeError: no mode runs the model.
    """
    choice = choose_mode(loaded)
    return choice.mode, {mode.value: reason for mode, reason in choice.refusals.items()}


def engine_of(mode: SchedulerMode, loaded: LoadedModel) -> Engine:
    """Return the lane's engine, narrowed to some memory as a worker's is."""
    return build_engine(mode, loaded, geometry=GEOMETRY, memory_bytes=_MEMORY_BYTES)


def caches_of(loaded: LoadedModel) -> str:
    """Name the kinds of caches that mlx-lm makes for a model."""
    kinds = Counter(type(cache).__name__ for cache in make_prompt_cache(loaded.model))
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())
