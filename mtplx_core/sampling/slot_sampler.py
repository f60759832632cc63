"""The sampler's view of the batch: parameters by slot and the token counts that penalties look at.

Keeps the shared sampler's arrays in step with who sits where and with what was committed. It chooses nothing by
itself: `sampling` does.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mtplx_core.engine import Row, SamplingParams
from mtplx_core.sampling.penalties import RowHistory, has_penalties, row_history
from mtplx_core.sampling.sampler import Noise, SamplingBatch


class RowSampler:
    """Sampling of the rows in their slots. A slot that was left keeps its parameters until somebody takes it."""

    def __init__(self, *, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: list[SamplingParams] = []
        self._histories: list[RowHistory | None] = []
        self._batch: SamplingBatch | None = None

    @property
    def arrays(self) -> list[mx.array]:
        """What grows with every commit and must be evaluated with it."""
        return [history.generated for history in self._histories if history is not None]

    def seat(self, slot: int, row: Row) -> None:
        needs_history = has_penalties(row.sampling)
        history = row_history(row.prompt, row.committed, vocab_size=self._vocab_size) if needs_history else None
        self.put(slot, row.sampling, history)

    def put(self, slot: int, sampling: SamplingParams, history: RowHistory | None) -> None:
        """Take a row in with what was generated of it."""
        if slot == len(self._rows):
            self._rows.append(sampling)
            self._histories.append(None)
        self._rows[slot], self._histories[slot] = sampling, history
        self._batch = None

    def lift(self, slot: int) -> tuple[SamplingParams, RowHistory | None]:
        """What `put` needs to put a row back."""
        return self._rows[slot], self._histories[slot]

    def pick(self, slots: Sequence[int]) -> None:
        """Keep some slots, in that order."""
        self._rows = [self._rows[slot] for slot in slots]
        self._histories = [self._histories[slot] for slot in slots]
        self._batch = None

    def noise(self, starts: mx.array, *, positions: int) -> Noise:
        return self._now().noise(starts, positions=positions)

    def choose(self, logits: mx.array, starts: mx.array, *, drafts: mx.array, noise: Noise | None = None) -> mx.array:
        """The plain choice at every position, (rows, positions) int32; see `SamplingBatch.choose`."""
        batch = self._now()
        chosen = batch.choose(logits, starts, history=self._histories, drafts=drafts, noise=noise)
        return chosen.astype(mx.int32)

    def choose_draft(self, logits: mx.array, starts: mx.array, *, vocabulary: mx.array, drafts: mx.array) -> mx.array:
        """One draft per row, (rows,) int32; `starts` is the position drafted, `drafts` are the ones before it."""
        chosen = self._now().choose_draft(logits, starts, vocabulary=vocabulary, history=self._histories, drafts=drafts)
        return chosen.astype(mx.int32)

    def commit(self, chosen: mx.array, taken: mx.array) -> None:
        """Count the first `taken` (rows,) of the tokens `chosen` (rows, positions) as generated."""
        steps = mx.arange(chosen.shape[1], dtype=mx.int32)
        for slot, history in enumerate(self._histories):
            if history is not None:
                counted = (steps < taken[slot]).astype(history.generated.dtype)
                self._histories[slot] = history._replace(generated=history.generated.at[chosen[slot]].add(counted))

    def _now(self) -> SamplingBatch:
        if self._batch is None:
            self._batch = SamplingBatch(self._rows, vocab_size=self._vocab_size)
        return self._batch
