"""The one sampler of all lanes: a pure function of logits, parameters, seed and position in the completion.

Order: bias, repetition, frequency, presence, the bar on ends before `min_tokens`, temperature, min_p, top_k, top_p;
then the largest of logit plus Gumbel noise, which is exact sampling. Nothing here reads a value back from the device,
and nothing is a matrix product, so the same logits give a row the same outcome, bit for bit, whatever rows stand
beside it.

    batch = SamplingBatch([row.sampling for row in rows], vocab_size=vocab)     # when rows join or leave
    noise = batch.noise(starts, positions=depth + 1)                            # optional: before the trunk runs
    draft = batch.choose_draft(head_logits, starts, vocabulary=ids, history=history, drafts=drafts_so_far)
    tokens = batch.choose(trunk_logits, starts, history=history, drafts=drafts, noise=noise)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import mlx.core as mx

from mtplx_core.engine import SamplingParams
from mtplx_core.sampling.filters import FilterRows, apply_filters, filter_rows, has_filters
from mtplx_core.sampling.min_tokens import bar_ends, end_bar
from mtplx_core.sampling.noise import gumbel, noise_keys, seed_words
from mtplx_core.sampling.penalties import (
    PenaltyRows,
    RowHistory,
    column,
    has_bias,
    has_penalties,
    penalise,
    penalty_rows,
)

History = Sequence[RowHistory | None]


_RANKED_TOP_K = 256
_CANDIDATES = 512
"""Tokens looked at where top_k is small: room for those that tie with the last one kept."""
_FILTERED_DRAFTS = 16_384
"""Tokens of a draft vocabulary over which top_k and top_p are applied to drafts."""


class _Path(NamedTuple):
    """Which stages a row goes through, by its own parameters alone; rows of one path are computed together."""

    is_edited: bool = False
    is_noisy: bool = False
    is_filtered: bool = False
    is_ranked: bool = False
    """Filters and noise see only the likeliest tokens."""


class Noise(NamedTuple):
    """Noise made ahead of the logits, by group of rows: none for greedy ones, only its keys for ranked ones."""

    by_group: tuple[mx.array | None, ...]


class SamplingBatch:
    """The parameters of some rows, on the device, in row order. Cheap to use and not quite cheap to make.

    Args:
        rows: parameters in row order; the default `SamplingParams()` stands for a parked row.
    """

    def __init__(self, rows: Sequence[SamplingParams], *, vocab_size: int) -> None:
        self.rows = tuple(rows)
        self.vocab_size = vocab_size
        self._groups = [_Group(path, places, self) for path, places in _by_path(rows, vocab_size).items()]
        order = [index for group in self._groups for index in group.indices]
        self._inverse = mx.array(sorted(range(len(order)), key=order.__getitem__), mx.int32)
        self._all_tokens = mx.arange(vocab_size, dtype=mx.uint32)
        self._bar = end_bar(self.rows, vocab_size=vocab_size)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether an argmax over the logits is all there is to do."""
        return self._bar is None and all(group.path == _Path() for group in self._groups)

    @property
    def needs_history(self) -> tuple[bool, ...]:
        """Which rows must bring a `RowHistory`."""
        return tuple(map(has_penalties, self.rows))

    def noise(self, starts: mx.array, *, positions: int) -> Noise:
        """The noise that `choose` will want for the same `starts`; it depends on no model output."""
        return Noise(tuple(group.noise(starts, self._all_tokens, positions=positions) for group in self._groups))

    def choose(
        self,
        logits: mx.array,
        starts: mx.array,
        *,
        history: History | None = None,
        drafts: mx.array | None = None,
        noise: Noise | None = None,
    ) -> mx.array:
        """Choose the token at each position.

        Args:
            logits: raw logits of any float type, (rows, positions, vocab).
            starts: position in the completion that `logits[:, 0]` predicts, (rows,) integer.
            history: committed tokens by row; needed where `needs_history` says so.
            drafts: (rows, positions - 1) tokens that the later positions are conditioned on.
            noise: from `noise` with the same starts and number of positions.

        Returns:
            (rows, positions) uint32
        """
        noise = noise or self.noise(starts, positions=logits.shape[1])
        logits = bar_ends(logits, self._bar, starts)
        parts = [
            group.choose(group.edited(logits, history, drafts), made)
            for group, made in zip(self._groups, noise.by_group, strict=True)
        ]
        return self._in_row_order(parts)

    def choose_draft(
        self,
        logits: mx.array,
        starts: mx.array,
        *,
        vocabulary: mx.array | None = None,
        history: History | None = None,
        drafts: mx.array | None = None,
    ) -> mx.array:
        """Draft one token per row, with the noise and the filters of the target's choice at that position.

        Over a whole vocabulary only min_p is applied, since the others would sort it. Whatever is drafted, what is
        committed is the target's choice.

        Args:
            logits: a head's logits, (rows, tokens).
            starts: position in the completion that is drafted, (rows,) integer.
            vocabulary: (tokens,) token ids of the last axis; None means the whole vocabulary.
            drafts: (rows, earlier drafts) that this one is conditioned on.

        Returns:
            (rows,) uint32 token ids
        """
        ids = self._all_tokens if vocabulary is None else vocabulary
        logits = bar_ends(logits[:, None], self._bar, starts, vocabulary=vocabulary)[:, 0]
        parts = [
            group.drafted(group.edited(logits[:, None], history, drafts, vocabulary), starts, ids)
            for group in self._groups
        ]
        chosen = mx.argmax(self._in_row_order(parts)[:, 0], axis=-1)
        return chosen if vocabulary is None else vocabulary[chosen].astype(mx.uint32)

    def scores(
        self,
        logits: mx.array,
        starts: mx.array,
        *,
        history: History | None = None,
        drafts: mx.array | None = None,
    ) -> mx.array:
        """What `choose` takes the largest of, (rows, positions, vocab) float32: for tests."""
        logits = bar_ends(logits, self._bar, starts)
        parts = [
            group.scores(group.edited(logits, history, drafts), starts, self._all_tokens) for group in self._groups
        ]
        return self._in_row_order(parts)

    def _in_row_order(self, parts: Sequence[mx.array]) -> mx.array:
        return parts[0] if len(parts) == 1 else mx.concatenate(list(parts))[self._inverse]


class _Group:
    """The rows of one path."""

    def __init__(self, path: _Path, indices: tuple[int, ...], batch: SamplingBatch) -> None:
        rows = [batch.rows[index] for index in indices]
        self.path = path
        self.indices = indices
        self._take = mx.array(indices, mx.int32) if len(indices) < len(batch.rows) else None
        self._penalties: PenaltyRows | None = None
        self._filters: FilterRows | None = None
        self._temperature = column([row.temperature or 1.0 for row in rows])
        if path.is_edited:
            self._penalties = penalty_rows(rows, vocab_size=batch.vocab_size)
        if path.is_noisy:
            self._seeds = seed_words([row.seed for row in rows])
        if path.is_filtered:
            self._filters = filter_rows(rows)

    def noise(self, starts: mx.array, token_ids: mx.array, *, positions: int) -> mx.array | None:
        if not self.path.is_noisy:
            return None
        keys = self._keys(starts, positions)
        return keys if self.path.is_ranked else gumbel(keys, token_ids)

    def edited(
        self, logits: mx.array, history: History | None, drafts: mx.array | None, vocabulary: mx.array | None = None
    ) -> mx.array:
        """This group's logits after bias, penalties and temperature."""
        logits = self._mine(logits).astype(mx.float32)
        if self._penalties is not None:
            mine = [history[index] if history else None for index in self.indices]
            made = self._mine(drafts) if drafts is not None else None
            logits = penalise(logits, self._penalties, history=mine, drafts=made, vocabulary=vocabulary)
        return logits / self._temperature if self.path.is_noisy else logits

    def choose(self, logits: mx.array, noise: mx.array | None) -> mx.array:
        """Tokens, (rows, positions), from edited logits and what `noise` made."""
        if noise is None:
            return mx.argmax(logits, axis=-1)
        if not self.path.is_ranked:
            return mx.argmax(self._filtered(logits) + noise, axis=-1)
        first = logits.shape[-1] - _CANDIDATES
        ids = mx.argpartition(logits, first, axis=-1)[..., first:]
        scores = self._filtered(mx.take_along_axis(logits, ids, axis=-1)) + gumbel(noise, ids)
        return mx.take_along_axis(ids, mx.argmax(scores, axis=-1, keepdims=True), axis=-1)[..., 0]

    def scores(self, logits: mx.array, starts: mx.array, token_ids: mx.array) -> mx.array:
        return self._with_noise(self._filtered(logits), starts, token_ids)

    def drafted(self, logits: mx.array, starts: mx.array, token_ids: mx.array) -> mx.array:
        """Scores of a head's edited logits, (rows, 1, tokens), by the filters that cost little over so many tokens."""
        if self._filters is not None:
            is_small = logits.shape[-1] <= _FILTERED_DRAFTS
            logits = apply_filters(
                logits, self._filters if is_small else self._filters._replace(top_k=None, top_p=None)
            )
        return self._with_noise(logits, starts, token_ids)

    def _with_noise(self, logits: mx.array, starts: mx.array, token_ids: mx.array) -> mx.array:
        return logits + gumbel(self._keys(starts, logits.shape[1]), token_ids) if self.path.is_noisy else logits

    def _filtered(self, logits: mx.array) -> mx.array:
        return logits if self._filters is None else apply_filters(logits, self._filters)

    def _keys(self, starts: mx.array, positions: int) -> mx.array:
        return noise_keys(self._seeds, self._mine(starts)[:, None] + mx.arange(positions))

    def _mine(self, rows: mx.array) -> mx.array:
        return rows if self._take is None else rows[self._take]


def _by_path(rows: Iterable[SamplingParams], vocab_size: int) -> dict[_Path, tuple[int, ...]]:
    paths: dict[_Path, tuple[int, ...]] = {}
    for index, row in enumerate(rows):
        path = _path(row, vocab_size)
        paths[path] = (*paths.get(path, ()), index)
    return paths


def _path(row: SamplingParams, vocab_size: int) -> _Path:
    is_edited = has_bias(row) or has_penalties(row)
    if row.is_greedy:
        return _Path(is_edited)  # the largest logit, which every filter keeps
    is_ranked = 0 < row.top_k <= _RANKED_TOP_K and vocab_size > _CANDIDATES
    return _Path(is_edited, True, has_filters(row), is_ranked)
