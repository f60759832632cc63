"""How many drafts would have been accepted, by replaying recorded greedy or sampled answers: head alone, lookup first.

Counted against the trunk's likeliest token of its whole vocabulary, so a token outside the draft vocabulary is a miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mtplx_core.forge.lessons import batch_lessons, collate
from mtplx_core.forge.states import Lesson
from mtplx_core.heads.base import Head
from mtplx_core.mtp.drafters import look_up

_POSITIONS = 2048


class Replay(NamedTuple):
    """Shares of positions at which the first draft is the trunk's likeliest token."""

    positions: int
    head: float
    """The head everywhere."""
    lookup_first: float
    """Prompt lookup where it finds something, else the head."""
    lookup_found: float
    lookup_right: float
    """Of the positions where it found something."""


def replay(head: Head, lessons: Sequence[Lesson], *, with_lookup: bool = True) -> Replay:
    """Draft one token behind every pair of every answer, the head's cache filled with the trunk's own states."""
    head_right: list[npt.NDArray[np.bool_]] = []
    lookup_right: list[npt.NDArray[np.bool_]] = []
    found: list[npt.NDArray[np.bool_]] = []
    for group in batch_lessons(lessons, positions=_POSITIONS):
        batch = collate(group)
        drafts = np.array(head.draft_ids)[np.array(head.logits(head(batch.hidden[:, :-1], batch.tokens)).argmax(-1))]
        wanted = np.array(batch.top_ids[..., 0])
        for row, lesson in enumerate(group):
            span = slice(max(lesson.answer_start - 2, 0), len(lesson.hidden) - 1)
            head_right.append(drafts[row, span] == wanted[row, span])
            guesses, has_guess = _look_ups(lesson, span) if with_lookup else (wanted[row, span], wanted[row, span] < 0)
            found.append(has_guess)
            lookup_right.append(guesses == wanted[row, span])
    return _shares(np.concatenate(head_right), np.concatenate(lookup_right), np.concatenate(found))


def _look_ups(lesson: Lesson, span: slice) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """What lookup says behind pair i, that is with tokens 0..i + 1 known."""
    lengths = mx.arange(span.start, span.stop, dtype=mx.int32) + 2
    history = mx.array(lesson.tokens.astype(np.int32))
    history = mx.broadcast_to(history, (lengths.size, history.size))
    tokens, found = look_up(history, lengths, 1)
    return np.array(tokens[:, 0]), np.array(found)


def _shares(head: npt.NDArray[np.bool_], lookup: npt.NDArray[np.bool_], found: npt.NDArray[np.bool_]) -> Replay:
    combined = np.where(found, lookup, head)
    right = float(lookup[found].mean()) if found.any() else 0.0
    return Replay(len(head), float(head.mean()), float(combined.mean()), float(found.mean()), right)
