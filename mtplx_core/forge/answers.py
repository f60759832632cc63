"""Answers to learn from: token sequences on disk, and asking an engine for more of them.

Token ids only; prompts arrive rendered and tokenised. What the trunk thought while answering is not kept here, see
`states`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mtplx_core.engine import Engine, Row, SamplingParams
from mtplx_core.errors import ForgeError

ANSWERS_PER_FILE = 256
_ARRAYS = ("tokens", "offsets", "answer_start", "temperature")

OnAnswers = Callable[[int, int], None]
"""Answers there are, answers wanted."""


class TrainingPrompt(NamedTuple):
    """One prompt as the model is to see it."""

    tokens: tuple[int, ...]
    temperature: float = 0.0


@dataclass(frozen=True, eq=False)
class Answers:
    """Prompts with their answers, one after another."""

    tokens: npt.NDArray[np.integer[Any]]
    offsets: npt.NDArray[np.int64]
    """Sequence i is `tokens[offsets[i]:offsets[i + 1]]`."""
    answer_start: npt.NDArray[np.int32]
    """Index within the sequence of the answer's first token."""
    temperature: npt.NDArray[np.float32]
    prompt_index: npt.NDArray[np.int64] | None = None
    """Which prompt of the list was answered, where that is known."""

    def __len__(self) -> int:
        return len(self.answer_start)

    def sequence(self, index: int) -> npt.NDArray[np.integer[Any]]:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)


def load_answers(path: Path) -> Answers:
    """Read one file of answers.

    Raises:
        ForgeError: unreadable, or arrays missing.
    """
    try:
        with np.load(path) as arrays:
            tokens, offsets, starts, temperatures = (arrays[name] for name in _ARRAYS)
            return Answers(tokens, offsets, starts, temperatures, arrays.get("prompt_index"))
    except (OSError, ValueError, KeyError) as error:
        raise ForgeError(f"{path} is not a file of answers: {error}") from error


def answer_files(folder: Path) -> list[Path]:
    """A folder's files of answers, in order; a single file stands for itself."""
    return [folder] if folder.is_file() else sorted(folder.glob("answers-*.npz"))


def collect_answers(
    engine: Engine, prompts: Sequence[TrainingPrompt], folder: Path, *, max_tokens: int, on_progress: OnAnswers
) -> None:
    """Let `engine` answer what `folder` has no answer to yet, at the engine's full width.

    Killed and called again with the same prompts, it goes on behind the last file it wrote.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = answer_files(folder)
    known = {int(i) for file in files for i in _prompt_index(file)}
    todo = iter([index for index in range(len(prompts)) if index not in known])
    done, fresh = len(known), []
    for index, tokens in _answer(engine, prompts, todo, max_tokens=max_tokens):
        fresh.append((index, tokens))
        done += 1
        on_progress(done, len(prompts))
        if len(fresh) == ANSWERS_PER_FILE:
            files.append(_save(folder, len(files), prompts, fresh))
            fresh = []
    if fresh:
        _save(folder, len(files), prompts, fresh)


def _answer(
    engine: Engine, prompts: Sequence[TrainingPrompt], todo: Iterator[int], *, max_tokens: int
) -> Iterator[tuple[int, list[int]]]:
    """Prompt indexes with their answers, as they end."""
    answers: dict[str, list[int]] = {}
    while True:
        while engine.active_rows < engine.geometry.decode_batch_max and (index := next(todo, None)) is not None:
            prompt = prompts[index]
            sampling = SamplingParams(temperature=prompt.temperature, seed=index)
            engine.admit(Row(str(index), prompt.tokens, max_tokens, sampling))
            answers[str(index)] = []
        if not engine.active_rows:
            return
        result = engine.step()
        for part in result.tokens:
            answers[part.row_id] += part.tokens
        for end in result.ends:
            if end.reason == "error":
                raise ForgeError(f"prompt {end.row_id} could not be answered: {end.message}")
            yield int(end.row_id), answers.pop(end.row_id)


def _save(folder: Path, number: int, prompts: Sequence[TrainingPrompt], fresh: list[tuple[int, list[int]]]) -> Path:
    sequences = [[*prompts[index].tokens, *tokens] for index, tokens in fresh]
    path = folder / f"answers-{number:05d}.npz"
    save_arrays(
        path,
        tokens=np.concatenate([np.asarray(sequence, np.uint32) for sequence in sequences]),
        offsets=np.cumsum([0, *map(len, sequences)], dtype=np.int64),
        answer_start=np.asarray([len(prompts[index].tokens) for index, _ in fresh], np.int32),
        temperature=np.asarray([prompts[index].temperature for index, _ in fresh], np.float32),
        prompt_index=np.asarray([index for index, _ in fresh], np.int64),
    )
    return path


def save_arrays(path: Path, **arrays: npt.NDArray[Any]) -> None:
    """Write arrays so that the file is either whole or not there."""
    part = path.with_name(f".{path.name}.part.npz")
    np.savez(part, allow_pickle=False, **arrays)
    os.replace(part, path)


def _prompt_index(path: Path) -> npt.NDArray[np.int64]:
    index = load_answers(path).prompt_index
    if index is None:
        raise ForgeError(f"{path} does not say which prompts it answers; collect into another folder")
    return index
