"""Turns recorded sequences into training batches: which are held out, which tokens are drafted, what each pair learns.

A pair is (hidden state at i, token at i + 1); it learns what the trunk thinks behind that token, at i + 1.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mtplx_core.forge.states import TOP, Lesson, load_lessons

_SHARDS_AT_ONCE = 24
"""Shards whose sequences are mixed and sorted by length together; bounds memory."""
_NOWHERE = -60.0
_HELD_OUT_EVERY = 16

Phrase = tuple[int, ...]


class LessonBatch(NamedTuple):
    """Pairs of some sequences, padded on the right."""

    hidden: mx.array
    """Trunk states, one more than there are pairs, (rows, positions + 1, hidden)."""
    tokens: mx.array
    """The token behind each state, (rows, positions) int32."""
    top_ids: mx.array
    """What each pair is to predict, (rows, positions, TOP) int32."""
    top_logprobs: mx.array
    """(rows, positions, TOP)"""
    is_answer: mx.array
    """Where an answer's token is predicted, (rows, positions) bool."""
    is_pair: mx.array
    """Not padding, and not the opening that all prompts share, (rows, positions) bool."""


class HoldOut:
    """Decides by prompt which sequences are kept from training.

    Args:
        phrases: topics as token ids: a prompt that contains one is held out. Of the others one in sixteen is, by a
            hash of the prompt, so that all answers to one prompt fall on the same side.
    """

    def __init__(self, phrases: Sequence[Phrase] = ()) -> None:
        self._by_first: dict[int, list[Phrase]] = {}
        for phrase in phrases:
            self._by_first.setdefault(phrase[0], []).append(phrase)

    def has(self, prompt: Phrase) -> bool:
        return self._names_topic(prompt) or zlib.crc32(repr(prompt).encode()) % _HELD_OUT_EVERY == 0

    def _names_topic(self, prompt: Phrase) -> bool:
        for place, token in enumerate(prompt):
            if any(prompt[place : place + len(phrase)] == phrase for phrase in self._by_first.get(token, ())):
                return True
        return False


def held_out_lessons(shards: Sequence[Path], hold_out: HoldOut, *, limit: int) -> list[Lesson]:
    """Held-out sequences, the first `limit` of each temperature there is."""
    kept: dict[float, list[Lesson]] = {}
    for lesson in (lesson for shard in shards for lesson in load_lessons(shard)):
        same = kept.setdefault(round(lesson.temperature, 3), [])
        if len(same) < limit and hold_out.has(lesson.prompt):
            same.append(_copy(lesson))
    return [lesson for _, same in sorted(kept.items()) for lesson in same]


def training_batches(
    shards: Sequence[Path], hold_out: HoldOut, *, positions: int, seed: int, opening: int
) -> Iterator[tuple[float, LessonBatch]]:
    """One epoch over all that is not held out, in batches of about `positions` pairs; the same for the same seed.

    Each batch comes with the share of the epoch that lies behind it.

    Args:
        opening: leading tokens that every prompt shares and nothing is learnt from.
    """
    shuffled = random.Random(seed)
    order = list(shards)
    shuffled.shuffle(order)
    for start in range(0, len(order), _SHARDS_AT_ONCE):
        pool = [lesson for shard in order[start : start + _SHARDS_AT_ONCE] for lesson in load_lessons(shard)]
        pool = [lesson for lesson in pool if not hold_out.has(lesson.prompt)]
        groups = batch_lessons(pool, positions=positions, shuffled=shuffled)
        shuffled.shuffle(groups)
        shards_here = len(order[start : start + _SHARDS_AT_ONCE])
        for number, group in enumerate(groups):
            share = (start + shards_here * number / len(groups)) / len(order)
            yield share, collate(group, opening=opening)


def batch_lessons(
    lessons: Sequence[Lesson], *, positions: int, shuffled: random.Random | None = None
) -> list[list[Lesson]]:
    """Sequences of like length together, each batch within `positions` with its padding."""
    jitter = shuffled or random.Random(0)
    ordered = sorted(lessons, key=lambda lesson: len(lesson.hidden) + jitter.random() * 16)
    groups: list[list[Lesson]] = []
    longest = 0
    for lesson in ordered:
        longest = max(longest, len(lesson.hidden))
        if not groups or longest * (len(groups[-1]) + 1) > positions:
            groups.append([])
            longest = len(lesson.hidden)
        groups[-1].append(lesson)
    return groups


def collate(lessons: Sequence[Lesson], *, opening: int = 0) -> LessonBatch:
    """Arrays of some sequences' pairs."""
    rows, positions = len(lessons), max(len(lesson.hidden) for lesson in lessons) - 1
    hidden = np.zeros((rows, positions + 1, lessons[0].hidden.shape[1]), np.float32)
    tokens = np.zeros((rows, positions), np.int32)
    ids = np.zeros((rows, positions, TOP), np.int32)
    logprobs = np.full((rows, positions, TOP), _NOWHERE, np.float32)
    is_answer = np.zeros((rows, positions), np.bool_)
    is_pair = np.zeros((rows, positions), np.bool_)
    for row, lesson in enumerate(lessons):
        pairs = len(lesson.hidden) - 1
        hidden[row, : pairs + 1] = lesson.hidden
        tokens[row, :pairs] = lesson.tokens[1 : pairs + 1]
        ids[row, :pairs] = lesson.top_ids[1:]
        logprobs[row, :pairs] = lesson.top_logprobs[1:]
        is_pair[row, opening:pairs] = True
        is_answer[row, max(lesson.answer_start - 2, 0) : pairs] = True
    return LessonBatch(*(mx.array(part) for part in (hidden, tokens, ids, logprobs, is_answer, is_pair)))


def shared_opening(lessons: Sequence[Lesson]) -> int:
    """Leading tokens that nearly all prompts share, as a system prompt makes them."""
    shortest = min(lesson.answer_start for lesson in lessons)
    first = np.stack([lesson.tokens[:shortest] for lesson in lessons])
    for place in range(shortest):
        if np.unique(first[:, place], return_counts=True)[1].max() < 0.8 * len(lessons):
            return place
    return 0


def draft_vocabulary(shards: Sequence[Path], hold_out: HoldOut, *, size: int, vocab_size: int) -> list[int]:
    """The tokens the trunk most often finds likeliest, ascending."""
    counts = np.zeros(vocab_size)
    for lesson in (lesson for shard in shards for lesson in load_lessons(shard)):
        if not hold_out.has(lesson.prompt):
            counts += np.bincount(lesson.top_ids[lesson.answer_start :, 0], minlength=vocab_size)
            counts += 0.2 * np.bincount(lesson.tokens, minlength=vocab_size)
    ids: list[int] = np.sort(np.argsort(-counts, kind="stable")[:size]).tolist()
    return ids


def _copy(lesson: Lesson) -> Lesson:
    """A lesson that does not keep its whole shard in memory."""
    parts: list[npt.NDArray[Any]] = [lesson.tokens, lesson.hidden, lesson.top_ids, lesson.top_logprobs]
    tokens, hidden, ids, logprobs = (part.copy() for part in parts)
    return Lesson(tokens, hidden, ids, logprobs, lesson.answer_start, lesson.temperature)
