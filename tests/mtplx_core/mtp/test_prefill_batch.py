"""Prompts that are fed together. Runs on a tiny random llama with a head, and on a tiny recurrent model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mtplx_core.engine import Row
from mtplx_core.heads.attached import AttachedHead
from mtplx_core.models.loader import LoadedModel
from mtplx_core.models.trunk import Trunk
from mtplx_core.mtp.prefill import Prefill
from mtplx_core.mtp.prefill_batch import PrefillBatcher
from tests.mtplx_core.heads.layouts import DENSE, loaded_of, tiny

CHUNK = 16
LENGTHS = {"a": 6, "b": 12, "c": 40}
ROWS = [Row(name, tuple(range(10, 10 + length)), 8) for name, length in LENGTHS.items()]
FATAL = 3


class CountedTrunk(Trunk):
    """Notes the shape of every forward; fails where it meets a fatal token."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.shapes: list[tuple[int, ...]] = []

    def hidden(self, tokens: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        if (tokens == FATAL).any().item():
            raise RuntimeError("out of memory")
        self.shapes.append(tuple(tokens.shape))
        return super().hidden(tokens, cache)


def feeder_of(trunk: Trunk, head: AttachedHead | None = None) -> PrefillBatcher:
    return PrefillBatcher(trunk, head, chunk_tokens=CHUNK, ends=())


def feed_whole(feeder: PrefillBatcher, prefills: list[Prefill], *, most: int) -> None:
    while not all(prefill.is_done for prefill in prefills):
        feeder.feed(prefills, most=most)


def test_prompts_fed_together_leave_what_each_leaves_alone(loaded: LoadedModel, head: AttachedHead) -> None:
    feeder = feeder_of(Trunk(loaded.model), head)
    together, alone = [feeder.prefill_of(row) for row in ROWS], [feeder.prefill_of(row) for row in ROWS]

    feed_whole(feeder, together, most=4 * CHUNK)
    for prefill in alone:
        feed_whole(feeder, [prefill], most=1)

    for one, other in zip(together, alone, strict=True):
        pairs = zip([*one.caches, *one.head_caches], [*other.caches, *other.head_caches], strict=True)
        for cache, expected in pairs:
            assert cache.offset == expected.offset
            for array, wanted in zip(cache.keys_and_values(), expected.keys_and_values(), strict=True):
                assert mx.allclose(array, wanted, rtol=1e-4, atol=1e-5).item()
        assert one.last_hidden is not None
        assert other.last_hidden is not None
        assert mx.allclose(one.last_hidden, other.last_hidden, rtol=1e-4, atol=1e-5).item()


def test_as_many_go_into_one_forward_as_the_budget_holds(loaded: LoadedModel) -> None:
    trunk = CountedTrunk(loaded.model)
    feeder = feeder_of(trunk)
    prefills = [feeder.prefill_of(row) for row in (ROWS[0], ROWS[1], ROWS[2], ROWS[0], ROWS[1])]
    trunk.shapes.clear()

    fed = feeder.feed(prefills, most=4 * CHUNK + 8)

    # The long one goes alone, chunk by chunk; the last short one finds no room left.
    assert trunk.shapes == [(2, 11), (1, CHUNK), (1, CHUNK), (1, 7), (1, 5)]
    assert fed.tokens == 5 + 11 + 39 + 5
    assert [progress.row_id for progress in fed.progress] == ["a", "b", "c", "c", "c", "a"]
    feeder.feed(prefills, most=1)
    assert trunk.shapes[5:] == [(1, 11)]


def test_row_whose_prefill_fails_does_not_take_the_others_along(loaded: LoadedModel) -> None:
    feeder = feeder_of(CountedTrunk(loaded.model))
    bad = Row("bad", (5, FATAL, 6), 8)
    prefills = [feeder.prefill_of(row) for row in (ROWS[0], bad, ROWS[1])]

    fed = feeder.feed(prefills, most=10 * CHUNK)

    assert [(end.row_id, end.reason) for end in fed.ends] == [("bad", "error")]
    assert [prefill.is_done for prefill in prefills] == [True, False, True]


def test_rows_with_a_recurrent_state_are_fed_one_at_a_time() -> None:
    trunk = CountedTrunk(loaded_of(tiny(DENSE)).model)
    feeder = feeder_of(trunk)
    prefills = [feeder.prefill_of(Row(name, (5, 6, 7, 8), 8)) for name in "ab"]
    trunk.shapes.clear()

    feeder.feed(prefills, most=10 * CHUNK)

    assert trunk.shapes == [(1, 3), (1, 3)]
