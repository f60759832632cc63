"""Prompts that are fed together. Runs on a tiny random llama with a head, and on a tiny recurrent model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from mtplx_core.engine import Row
from mtplx_core.heads.attached import AttachedHead
from mtplx_core.models.loader import LoadedModel
from mtplx_core.models.trunk import Trunk
from mtplx_core.mtp.prefill import Prefill
from mtplx_core.mtp.prefill_batch import OLDEST_EVERY, PrefillBatcher
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

    # Four short ones go together, and then the long one alone, of which the second chunk finds no room left.
    assert trunk.shapes == [(4, 11), (1, CHUNK)]
    assert fed.tokens == 2 * (5 + 11) + CHUNK
    assert [progress.row_id for progress in fed.progress] == ["a", "a", "b", "b", "c"]
    feeder.feed(prefills, most=2 * CHUNK)
    assert trunk.shapes[2:] == [(1, CHUNK), (1, 7)]


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


@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_long_prompt_holds_a_short_one_up_for_two_chunks_at_most(loaded: LoadedModel, chunks: int) -> None:
    feeder = feeder_of(Trunk(loaded.model))
    long = feeder.prefill_of(Row("long", tuple(range(200)), 8))
    short = feeder.prefill_of(Row("short", tuple(range(10, 10 + chunks * CHUNK)), 8))
    feeder.feed([long], most=CHUNK)
    feeder.feed([long], most=CHUNK)

    forwards = forwards_until_done(feeder, [long, short], short)

    assert forwards <= chunks + 2


def test_long_prompt_is_fed_though_short_ones_never_cease_to_come(loaded: LoadedModel) -> None:
    feeder = feeder_of(Trunk(loaded.model))
    long = feeder.prefill_of(Row("long", tuple(range(10 * CHUNK + 1)), 8))
    waiting, forwards = [long], 0
    while not long.is_done:
        waiting = [prefill for prefill in waiting if not prefill.is_done]
        waiting.append(feeder.prefill_of(Row(f"short {forwards}", tuple(range(CHUNK + 1)), 8)))
        feeder.feed(waiting, most=1)
        forwards += 1

    assert forwards <= OLDEST_EVERY * 10


def test_prompts_of_offline_rows_wait_for_all_others(loaded: LoadedModel) -> None:
    feeder = feeder_of(Trunk(loaded.model))
    offline = feeder.prefill_of(Row("offline", (5, 6, 7), 8, is_offline=True))
    long = feeder.prefill_of(Row("long", tuple(range(20 * CHUNK)), 8))

    forwards_until_done(feeder, [offline, long], long)

    assert offline.done == 0


def forwards_until_done(feeder: PrefillBatcher, waiting: list[Prefill], awaited: Prefill) -> int:
    """How many forwards of one chunk it takes until a prompt is fed."""
    forwards = 0
    while not awaited.is_done:
        feeder.feed([prefill for prefill in waiting if not prefill.is_done], most=1)
        forwards += 1
    return forwards
