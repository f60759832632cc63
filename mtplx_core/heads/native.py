"""Heads that checkpoints bring along: which families are known, and reading one out of a loaded model's folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mtplx_core.heads import mimo, qwen
from mtplx_core.heads.base import Head
from mtplx_core.heads.norms import Convention
from mtplx_core.heads.tensors import Tensors, find_tensors, load_files
from mtplx_core.heads.usefulness import measure_agreement, own_text, require_useful_head
from mtplx_core.models.loader import LoadedModel, text_config
from mtplx_core.models.trunk import Trunk

logger = logging.getLogger(__name__)


_CLEARLY = 0.05
"""More agreement than chance gives another reading of the norms, on texts of 64 tokens."""


class Family(NamedTuple):
    """Models that keep their head in one layout."""

    name: str
    model_types: Sequence[str]
    prefixes: Sequence[str]


QWEN = Family("Qwen3-Next and Qwen3.5", qwen.MODEL_TYPES, qwen.PREFIXES)
MIMO = Family("MiMo", mimo.MODEL_TYPES, mimo.PREFIXES)
FAMILIES = (QWEN, MIMO)


class NativeHead(NamedTuple):
    """A head read out of a checkpoint."""

    head: Head
    convention: str
    agreement: float
    """How often it drafts what its trunk says, on text the trunk makes up."""


def family_of(config: Mapping[str, Any]) -> Family | None:
    """The family whose heads are read here, if the model is of one."""
    kinds = {config.get("model_type"), text_config(config).get("model_type")}
    return next((family for family in FAMILIES if kinds & set(family.model_types)), None)


def stored_head(files: Mapping[str, Tensors], config: Mapping[str, Any]) -> Tensors:
    """The head's tensors among a checkpoint's; empty where it has none or is of no known family."""
    family = family_of(config)
    return find_tensors(files, family.prefixes) if family is not None else {}


def load_native_head(loaded: LoadedModel, trunk: Trunk) -> NativeHead | None:
    """The checkpoint's own head, read the way its norms are meant; None where it brings none.

    Raises:
        ModelLoadError: it is incomplete, of a kind that is not run here, or drafts next to nothing right.
    """
    family = family_of(loaded.config)
    tensors = stored_head(load_files(loaded.path), loaded.config) if family is not None else {}
    if not tensors:
        return None
    if family is MIMO:
        head: Head = mimo.load_mimo_head(trunk, tensors)
        return NativeHead(head, "as stored", require_useful_head(trunk, head))
    return _best_reading(trunk, qwen.StoredQwenHead(trunk, tensors, {**loaded.config, **text_config(loaded.config)}))


def _best_reading(trunk: Trunk, stored: qwen.StoredQwenHead) -> NativeHead:
    """The likeliest norm convention, or the one under which the head agrees clearly more with its trunk."""
    text = own_text(trunk)
    agreements: list[tuple[float, Convention]] = []
    for convention in stored.conventions:
        stored.read_as(convention)
        agreements.append((measure_agreement(trunk, stored.head, text), convention))
    first, best = agreements[0], max(agreements, key=lambda pair: pair[0])
    if best[0] < first[0] + _CLEARLY:
        best = first
    else:
        logger.warning(
            "the head's norms drafted %.0f %% right as they look, %.0f %% %s",
            100 * first[0],
            100 * best[0],
            best[1].name,
        )
    stored.read_as(best[1])
    mx.eval(stored.head.parameters())
    return NativeHead(stored.head, best[1].name, require_useful_head(trunk, stored.head, text=text))
