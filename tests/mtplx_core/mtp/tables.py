"""Models that are small tables, for checking the cycle token by token against the plain sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mtplx_core.engine import Row, SamplingParams
from mtplx_core.mtp.cycle import RowState
from mtplx_core.sampling.penalties import RowHistory, has_penalties, row_history
from mtplx_core.sampling.sampler import SamplingBatch
from mtplx_core.sampling.slot_sampler import RowSampler

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Tables:
    """One random bigram model, one prompt and one set of sampling parameters per row."""

    logits: mx.array
    """(rows, vocab, vocab): what follows what."""
    rows: tuple[Row, ...]

    @property
    def vocab_size(self) -> int:
        return int(self.logits.shape[-1])

    def forward(self, tokens: mx.array) -> mx.array:
        """(rows, positions) to (rows, positions, vocab)"""
        return mx.take_along_axis(self.logits, tokens[:, :, None], axis=1)


def random_tables(
    rng: np.random.Generator, *, rows: int, vocab_size: int, max_tokens: int, has_penalties: bool
) -> Tables:
    logits = rng.normal(size=(rows, vocab_size, vocab_size)) * rng.uniform(0.1, 4.0, size=(rows, 1, 1))
    options = [_random_sampling(rng, vocab_size, has_penalties=has_penalties) for _ in range(max(rows // 50, 1))]
    made = [
        Row(
            str(index),
            tuple(int(token) for token in rng.integers(vocab_size, size=rng.integers(1, 5))),
            max_tokens,
            _reseeded(options[index % len(options)], int(rng.integers(2**63))),
        )
        for index in range(rows)
    ]
    return Tables(mx.array(logits.astype(np.float32)), tuple(made))


def plain_tokens(tables: Tables, *, count: int) -> Tokens:
    """The first `count` tokens of every row by plain sampling, one position at a time; (rows, count)."""
    batch = SamplingBatch([row.sampling for row in tables.rows], vocab_size=tables.vocab_size)
    history: list[RowHistory | None] = [
        row_history(row.prompt, (), vocab_size=tables.vocab_size) if has_penalties(row.sampling) else None
        for row in tables.rows
    ]
    last = mx.array([row.prompt[-1] for row in tables.rows], mx.int32)
    columns: list[Any] = []
    for position in range(count):
        starts = mx.full((len(tables.rows),), position, mx.int32)
        last = batch.choose(tables.forward(last[:, None]), starts, history=history)[:, 0].astype(mx.int32)
        columns.append(np.array(last))
        history = [
            past.append([int(token)]) if past is not None else None
            for past, token in zip(history, columns[-1], strict=True)
        ]
    return np.stack(columns, axis=1)


def restarted(tables: Tables, committed: Sequence[Sequence[int]], *, capacity: int) -> tuple[RowState, RowSampler]:
    """Device state as a worker that takes the rows over makes it, knowing only what was committed."""
    sampler = RowSampler(vocab_size=tables.vocab_size)
    history = np.zeros((len(tables.rows), capacity), np.int32)
    for slot, (row, done) in enumerate(zip(tables.rows, committed, strict=True)):
        sampler.seat(slot, Row(row.row_id, row.prompt, row.max_tokens, row.sampling, committed=tuple(done)))
        sequence = [*row.prompt, *done]
        history[slot, : len(sequence)] = sequence
    lengths = np.array([len(row.prompt) + len(done) for row, done in zip(tables.rows, committed, strict=True)])
    state = RowState(
        mx.array(history[np.arange(len(lengths)), lengths - 1]),
        mx.array((lengths - 1).astype(np.int32)),
        mx.array([len(done) for done in committed], mx.int32),
        mx.array(history),
    )
    return state, sampler


def _random_sampling(rng: np.random.Generator, vocab_size: int, *, has_penalties: bool) -> SamplingParams:
    def sometimes(value: float, neutral: float) -> float:
        return value if rng.random() < 0.3 else neutral

    def penalty(low: float, high: float, neutral: float) -> float:
        return sometimes(float(rng.uniform(low, high)), neutral) if has_penalties else neutral

    bias = ((int(rng.integers(vocab_size)), float(rng.normal())),) if rng.random() < 0.2 else ()
    return SamplingParams(
        temperature=sometimes(0.0, float(rng.uniform(0.2, 2.0))),
        top_p=sometimes(float(rng.uniform(0.2, 1.0)), 1.0),
        top_k=int(sometimes(float(rng.integers(1, vocab_size + 1)), 0)),
        min_p=sometimes(float(rng.uniform(0.0, 0.5)), 0.0),
        repetition_penalty=penalty(0.7, 1.6, 1.0),
        presence_penalty=penalty(-1.0, 1.0, 0.0),
        frequency_penalty=penalty(-1.0, 1.0, 0.0),
        logit_bias=bias,
    )


def _reseeded(sampling: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.logit_bias,
        seed,
    )
