"""Reads `generation_config.json`, where the authors of a model say how it is meant to be sampled and what ends it.

`do_sample` is not read: it is false wherever a file leaves it out, so most files would ask for greedy decoding that
their authors do not mean. A caller who wants it says temperature 0.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

logger = logging.getLogger(__name__)

FILE_NAME = "generation_config.json"
_MOST = 1000
"""No author means more than that; whole numbers in JSON have no bound of their own."""


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """What the file says; None where it says nothing, or nothing that can be used."""

    eos_token_ids: frozenset[int] = frozenset()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 means no bound."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


def read_generation_config(files: Mapping[str, bytes]) -> GenerationConfig:
    """Read the file among a tokenizer's files; values that are out of bounds are passed over with a warning."""
    said = _decode(files.get(FILE_NAME, b"{}"))
    top_k = _whole(said, "top_k", least=-1)
    return GenerationConfig(
        eos_token_ids=frozenset(_eos_ids(said)),
        temperature=_number(said, "temperature", lambda value: 0 <= value <= _MOST),
        top_p=_number(said, "top_p", lambda value: 0 <= value <= 1),
        top_k=None if top_k is None else max(0, top_k),
        min_p=_number(said, "min_p", lambda value: 0 <= value <= 1),
        repetition_penalty=_number(said, "repetition_penalty", lambda value: 0 < value <= _MOST),
        max_new_tokens=_whole(said, "max_new_tokens", least=1),
    )


def _decode(content: bytes) -> Mapping[str, Any]:
    try:
        said = json.loads(content)
    except (ValueError, RecursionError) as error:
        logger.warning("%s cannot be read and is passed over: %s", FILE_NAME, error)
        return {}
    return said if isinstance(said, dict) else {}


def _eos_ids(said: Mapping[str, Any]) -> list[int]:
    value = said.get("eos_token_id")
    listed = value if isinstance(value, list) else [value]
    return [each for each in listed if _is_whole(each) and each >= 0]


def _number(said: Mapping[str, Any], name: str, is_good: Callable[[float], bool]) -> float | None:
    value = said.get(name)
    if (_is_whole(value) or isinstance(value, float)) and is_good(value):
        return float(value)
    _warn(name, value)
    return None


def _whole(said: Mapping[str, Any], name: str, *, least: int) -> int | None:
    value = said.get(name)
    if _is_whole(value) and least <= value < 2**31:
        return value
    _warn(name, value)
    return None


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _warn(name: str, value: Any) -> None:
    if value is not None:
        logger.warning("%s: %s = %r cannot be used and is passed over", FILE_NAME, name, value)
