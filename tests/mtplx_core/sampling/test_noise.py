"""Noise against fixed vectors and against plain Python integers. Engine: none."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from scipy import stats

from mtplx_core.sampling.noise import gumbel, noise_bits, noise_keys, seed_words
from tests.mtplx_core.sampling.reference_sampler import reference_bits

VECTORS = [
    # seed, position, token id, bits
    (0x0, 0, 0, 0xCFC030A2),
    (0x0, 0, 1, 0x375A3468),
    (0x0, 1, 0, 0xCDF68115),
    (0x1, 0, 0, 0xEEE04BBB),
    (0x7, 3, 49151, 0x01F2EEA0),
    (0x100000000, 0, 0, 0xF0D1FF8F),
    (0xDEADBEEFCAFEBABE, 1000, 128255, 0x53632D57),
    (0xFFFFFFFFFFFFFFFF, 1048576, 2147483647, 0xE27CFE36),
]


def bits_of(seed: int, position: int, tokens: list[int]) -> list[int]:
    keys = noise_keys(seed_words([seed]), mx.array([[position]]))
    values: list[int] = noise_bits(keys, mx.array(tokens))[0, 0].tolist()  # type: ignore[assignment]  # nested lists
    return values


@pytest.mark.parametrize(("seed", "position", "token", "bits"), VECTORS)
def test_noise_has_its_published_bits(seed: int, position: int, token: int, bits: int) -> None:
    assert bits_of(seed, position, [token]) == [bits]
    assert reference_bits(seed, position, token) == bits


def test_noise_equals_plain_integers_for_many_keys() -> None:
    rng = np.random.default_rng(1)
    seeds = [int(s) for s in rng.integers(0, 2**64, 20, dtype=np.uint64)]

    for seed in seeds:
        position, token = int(rng.integers(0, 2**20)), int(rng.integers(0, 2**18))
        assert bits_of(seed, position, [token]) == [reference_bits(seed, position, token)]


def test_noise_of_a_subset_is_the_subset_of_the_noise() -> None:
    keys = noise_keys(seed_words([5, 6]), mx.array([[0, 1, 2], [7, 8, 9]]))
    subset = mx.array([900, 3, 77])

    whole = noise_bits(keys, mx.arange(1000))

    assert noise_bits(keys, subset).tolist() == whole[..., subset].tolist()


def test_noise_does_not_depend_on_the_rows_beside_it() -> None:
    alone = noise_bits(noise_keys(seed_words([6]), mx.array([[8]])), mx.arange(100))

    among = noise_bits(noise_keys(seed_words([5, 6]), mx.array([[0, 1], [7, 8]])), mx.arange(100))

    assert among[1, 1].tolist() == alone[0, 0].tolist()


def test_seeds_that_differ_in_the_high_word_give_different_noise() -> None:
    assert bits_of(1, 0, [0, 1, 2, 3]) != bits_of(1 + (1 << 32), 0, [0, 1, 2, 3])


def test_gumbel_noise_is_never_plus_infinity() -> None:
    positions = mx.arange(200).reshape(1, -1)

    noise = gumbel(noise_keys(seed_words([3]), positions), mx.arange(49152))

    assert bool(mx.all(noise < mx.inf).item())


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
def test_gumbel_noise_follows_its_law_along_every_axis(axis: str) -> None:
    count = 20_000
    seeds = seed_words(list(range(count)) if axis == "seed" else [7])
    positions = mx.arange(count).reshape(1, -1) if axis == "position" else mx.zeros((seeds.shape[0], 1), mx.int32)
    tokens = mx.arange(count) if axis == "token" else mx.array([11])

    noise = np.array(gumbel(noise_keys(seeds, positions), tokens)).ravel()

    assert stats.kstest(noise, "gumbel_r").pvalue > 0.001


@pytest.mark.parametrize("step", ["position", "seed", "token"])
def test_bits_of_neighbours_are_independent(step: str) -> None:
    seeds = seed_words(list(range(64)))
    keys = noise_keys(seeds, mx.broadcast_to(mx.arange(33), (64, 33)))
    bits = np.array(noise_bits(keys, mx.arange(513))) >> 28  # (seeds, positions, tokens), 16 classes
    axis = {"seed": 0, "position": 1, "token": 2}[step]
    here, there = np.take(bits, range(bits.shape[axis] - 1), axis), np.take(bits, range(1, bits.shape[axis]), axis)

    pairs = np.bincount((here * 16 + there).ravel(), minlength=256)

    assert stats.chisquare(pairs).pvalue > 0.001
