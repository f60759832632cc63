"""Attention over ragged caches on a CPU: the numbers are mlx-lm's, and each row pays for its own length. Tiny llama."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.llama import Attention

from harness.models import random_llama, tiny_llama
from mtplx_core.caches.attention import attend, route_attention
from mtplx_core.caches.forward import RowSpan
from mtplx_core.caches.ragged import RaggedCache
from mtplx_core.models.trunk import Trunk
from mtplx_core.mtp.device_batch import new_trunk_cache

LENGTHS = (3, 400, 130, 127, 260)


@pytest.fixture(scope="module")
def trunk() -> Trunk:
    return Trunk(tiny_llama().model)


def begun(trunk: Trunk, positions: int, *, lengths: tuple[int, ...] | None = LENGTHS) -> RaggedCache:
    """A cache of random keys and values whose rows are about to be fed."""
    cache = new_trunk_cache(trunk, max_positions=4)
    cache.reserve(len(LENGTHS), max(LENGTHS))
    for place, layer in enumerate(cache.attention):
        layer.keys = mx.random.normal(layer.keys.shape, key=mx.random.key(place))
        layer.values = mx.random.normal(layer.values.shape, key=mx.random.key(100 + place))
    offset = mx.array(LENGTHS, mx.int32) - positions
    cache.begin(offset, positions, longest=max(LENGTHS), lengths=lengths)
    return cache


@pytest.mark.parametrize("positions", [1, 3])
def test_attention_gives_what_mlx_gives(trunk: Trunk, positions: int) -> None:
    layer = begun(trunk, positions).attention[0]
    queries = mx.random.normal((len(LENGTHS), 4, positions, 16), key=mx.random.key(9))
    mask = layer.make_mask(positions)
    keys, values = (array[:, :, : mask.shape[-1]] for array in layer.arrays)

    ours = attend(queries, keys, values, cache=layer, scale=0.25, mask=mask)

    theirs = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.25, mask=mask)
    assert mx.allclose(ours, theirs, atol=1e-5)


def test_attention_obeys_the_mask_it_is_given_whatever_other_layers_brought(trunk: Trunk) -> None:
    layer = begun(trunk, 1).attention[0]
    queries = mx.random.normal((len(LENGTHS), 4, 1, 16), key=mx.random.key(9))
    mask = layer.make_mask(1)
    narrower = mask & (mx.arange(mask.shape[-1]) > 0)
    keys, values = (array[:, :, : mask.shape[-1]] for array in layer.arrays)

    for given in (mask, narrower, mask):
        ours = attend(queries, keys, values, cache=layer, scale=0.25, mask=given)

        theirs = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.25, mask=given)
        assert mx.allclose(ours, theirs, atol=1e-5)


def test_rows_are_run_together_where_neighbours_round_up_to_one_length(trunk: Trunk) -> None:
    layer = begun(trunk, 1).attention[0]

    assert layer.runs == (RowSpan(0, 1, 256), RowSpan(1, 2, 448), RowSpan(2, 4, 256), RowSpan(4, 5, 448))


def test_rows_of_unknown_lengths_attend_to_the_longest(trunk: Trunk) -> None:
    assert begun(trunk, 1, lengths=None).attention[0].runs == (RowSpan(0, 5, 448),)


def test_row_is_bit_equal_beside_a_longer_neighbour(trunk: Trunk) -> None:
    """As long as the neighbour does not change the bucket of the batch."""
    tokens = mx.array([[7], [8], [9], [10], [11]])
    cache = begun(trunk, 1)
    one = trunk.hidden(tokens, cache.layers)[2]
    longer = (300, *LENGTHS[1:])
    other = begun(trunk, 1)
    other.begin(mx.array(longer, mx.int32) - 1, 1, longest=max(longer), lengths=longer)

    assert mx.array_equal(trunk.hidden(tokens, other.layers)[2], one)


def test_routing_leaves_other_caches_and_other_models_alone() -> None:
    routed: Any = random_llama(seed=0)
    tokens = mx.array([[5, 6, 7]])
    before = routed(tokens)

    route_attention(routed)
    kind = type(routed.layers[0].self_attn)
    route_attention(routed)

    assert mx.array_equal(routed(tokens), before)
    assert type(routed.layers[0].self_attn) is kind is not Attention
    assert type(random_llama(seed=0).layers[0].self_attn) is Attention
