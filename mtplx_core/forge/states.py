"""What the trunk thinks at every token of the answers: hidden states and most likely next tokens, on disk in shards.

Teacher forcing runs at prefill speed. A shard is whole or not there, so a run that was killed goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mtplx_core.errors import ForgeError
from mtplx_core.forge.answers import Answers, answer_files, load_answers, save_arrays
from mtplx_core.models.trunk import Trunk

TOP = 16
"""Most likely next tokens kept per position."""
SEQUENCES_PER_SHARD = 64
_ROWS = 8
_POSITIONS = 256
"""Positions whose logits are held at once; bounds memory."""
_BLOCK = 128

OnStates = Callable[[int, int], None]
"""Tokens done, tokens in all."""


@dataclass(frozen=True, eq=False)
class Lesson:
    """One sequence and what the trunk thought of its tokens."""

    tokens: npt.NDArray[np.integer[Any]]
    hidden: npt.NDArray[np.float16]
    """After the final norm, (states, hidden); there may be one state fewer than tokens."""
    top_ids: npt.NDArray[np.integer[Any]]
    """(states, TOP) most likely next tokens of the whole vocabulary, most likely first."""
    top_logprobs: npt.NDArray[np.float16]
    """(states, TOP)"""
    answer_start: int
    temperature: float

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(self.tokens[: self.answer_start].tolist())


class Top(NamedTuple):
    """The head of a distribution."""

    ids: mx.array
    """(positions, TOP) int32, most likely first."""
    logprobs: mx.array
    """(positions, TOP)"""
    rest: mx.array
    """Probability of all other tokens, (positions,)."""


def record_states(trunk: Trunk, answers: Path, folder: Path, *, on_progress: OnStates) -> None:
    """Run all answers in file or folder `answers` through the trunk, into shards in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [(file, load_answers(file)) for file in answer_files(answers)]
    total = sum(int(part.lengths.sum()) for _, part in files)
    done = 0
    for file, part in files:
        # Mixed lengths in a shard, so that any shard is a fair sample.
        order = np.random.default_rng(0).permutation(len(part))
        for number, start in enumerate(range(0, len(part), SEQUENCES_PER_SHARD)):
            rows = order[start : start + SEQUENCES_PER_SHARD]
            shard = folder / f"states-{file.stem}-{number:04d}.npz"
            if not shard.exists():
                _record_shard(trunk, part, rows, shard)
            done += int(part.lengths[rows].sum())
            on_progress(done, total)


def shard_files(folder: Path) -> list[Path]:
    """A folder's shards, in order.

    Raises:
        ForgeError: there are none.
    """
    files = sorted(folder.glob("states-*.npz"))
    if not files:
        raise ForgeError(f"no states in {folder}; collect some first")
    return files


def load_lessons(shard: Path) -> list[Lesson]:
    """Read one shard."""
    with np.load(shard) as arrays:
        tokens, hidden = arrays["tokens"], arrays["hidden"]
        ids, logprobs = arrays["top_ids"], arrays["top_logprobs"]
        bounds = zip(_spans(arrays["offsets"]), _spans(arrays["state_offsets"]), strict=True)
        facts = zip(bounds, arrays["answer_start"].tolist(), arrays["temperature"].tolist(), strict=True)
    return [
        Lesson(tokens[span], hidden[states], ids[states], logprobs[states], start, temperature)
        for (span, states), start, temperature in facts
    ]


def most_likely(logits: mx.array) -> Top:
    """The TOP most likely tokens of (positions, vocab) logits."""
    positions, vocab = logits.shape
    blocks = -(-vocab // _BLOCK)
    padded = mx.pad(logits, [(0, 0), (0, blocks * _BLOCK - vocab)], constant_values=-mx.inf)
    padded = padded.reshape(positions, blocks, _BLOCK)
    # The TOP largest lie in the TOP blocks with the largest maxima: only those are looked through.
    count = min(TOP, blocks)
    best = mx.argpartition(-padded.max(axis=-1), kth=count - 1, axis=-1)[:, :count]
    values = mx.take_along_axis(padded, best[:, :, None], axis=1).reshape(positions, -1)
    names = (best[:, :, None] * _BLOCK + mx.arange(_BLOCK)).reshape(positions, -1)
    order = mx.argpartition(-values, kth=TOP - 1, axis=-1)[:, :TOP]
    kept = mx.take_along_axis(values, order, axis=-1)
    order = mx.take_along_axis(order, mx.argsort(-kept, axis=-1), axis=-1)
    logprobs = mx.take_along_axis(values, order, axis=-1) - mx.logsumexp(logits, axis=-1, keepdims=True)
    rest = mx.maximum(1 - mx.exp(logprobs).sum(axis=-1), 0.0)
    return Top(mx.take_along_axis(names, order, axis=-1).astype(mx.int32), logprobs, rest)


def _record_shard(trunk: Trunk, answers: Answers, rows: npt.NDArray[np.int64], shard: Path) -> None:
    rows = rows[np.argsort(answers.lengths[rows], kind="stable")]
    hidden: list[npt.NDArray[np.float16]] = []
    tops: list[Top] = []
    for start in range(0, len(rows), _ROWS):
        states = _hidden(trunk, [answers.sequence(int(row)) for row in rows[start : start + _ROWS]])
        hidden.append(np.array(states.astype(mx.float16)))
        tops += _tops(trunk, states)
    offsets = np.cumsum([0, *answers.lengths[rows]], dtype=np.int64)
    save_arrays(
        shard,
        tokens=np.concatenate([answers.sequence(int(row)) for row in rows]).astype(np.uint32),
        offsets=offsets,
        state_offsets=offsets,
        answer_start=answers.answer_start[rows],
        temperature=answers.temperature[rows],
        hidden=np.concatenate(hidden),
        top_ids=np.concatenate([np.array(top.ids, np.uint32) for top in tops]),
        top_logprobs=np.concatenate([np.array(top.logprobs.astype(mx.float16)) for top in tops]),
        rest=np.concatenate([np.array(top.rest.astype(mx.float16)) for top in tops]),
    )


def _hidden(trunk: Trunk, sequences: Sequence[npt.NDArray[np.integer[Any]]]) -> mx.array:
    """Hidden states of all sequences' tokens, one sequence after another, (tokens, hidden)."""
    longest = max(map(len, sequences))
    tokens = np.zeros((len(sequences), longest), np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
    states = trunk.hidden(mx.array(tokens))  # padding is on the right, where a causal model does not look
    flat = mx.concatenate([states[row, : len(sequence)] for row, sequence in enumerate(sequences)])
    mx.eval(flat)
    return flat


def _tops(trunk: Trunk, hidden: mx.array) -> Iterator[Top]:
    for start in range(0, hidden.shape[0], _POSITIONS):
        top = most_likely(trunk.logits(hidden[start : start + _POSITIONS]).astype(mx.float32))
        mx.eval(top)
        yield top


def _spans(offsets: npt.NDArray[np.int64]) -> list[slice]:
    return [slice(int(start), int(end)) for start, end in zip(offsets, offsets[1:], strict=False)]
