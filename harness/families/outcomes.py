"""What becomes of a family: the mode its lane runs in, why not a better one, and whether its answers are exact."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mlx_lm.models.cache import make_prompt_cache

from harness.families.checkpoints import write_checkpoint
from harness.families.trial import GEOMETRY, judge, run_rows
from mtplx_core.build import build_engine, choose_mode
from mtplx_core.engine import Engine, SchedulerMode
from mtplx_core.errors import ModelLoadError, UnsupportedModeError
from mtplx_core.models.loader import LoadedModel, load_model

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


class Choice(NamedTuple):
    """A mode, or none, and why each better one is not it."""

    mode: SchedulerMode | None
    refusals: Mapping[str, str]


def outcome_of(family: str, folder: Path) -> Outcome:
    """Write the family's checkpoint into `folder`, serve it as a worker would, and judge the answers."""
    try:
        loaded = load_model(write_checkpoint(folder, family))
    except ModelLoadError as error:
        return Outcome(family, refusals={"load": str(error)})
    caches = caches_of(loaded)
    choice = chosen_mode(loaded)
    if choice.mode is None:
        return Outcome(family, caches, refusals=choice.refusals)
    verdict = judge(loaded, run_rows(engine_of(choice.mode, loaded)))
    return Outcome(family, caches, choice.mode, choice.refusals, verdict.failures)


def chosen_mode(loaded: LoadedModel) -> Choice:
    """Return what a worker without a configured mode takes."""
    try:
        mode, refusals = choose_mode(loaded)
    except UnsupportedModeError as error:
        return Choice(None, dict(_REASONS.findall(str(error))))
    return Choice(mode, {refused.value: reason for refused, reason in refusals.items()})


def engine_of(mode: SchedulerMode, loaded: LoadedModel) -> Engine:
    """Return the lane's engine, narrowed to some memory as a worker's is."""
    return build_engine(mode, loaded, geometry=GEOMETRY, memory_bytes=_MEMORY_BYTES)


def caches_of(loaded: LoadedModel) -> str:
    """Name the kinds of caches that mlx-lm makes for a model."""
    kinds = Counter(type(cache).__name__ for cache in make_prompt_cache(loaded.model))
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())
