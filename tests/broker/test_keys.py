"""Keys: one hash tag, and which may live for ever. Engine: none; Redis: none."""

from __future__ import annotations

import pytest

from broker import keys

BUILT = [
    keys.wait("interactive"),
    keys.state("r1"),
    keys.log("r1"),
    keys.logprobs("r1"),
    keys.jobs("w1"),
    keys.rows("w1"),
    keys.daemon("w1"),
    keys.tokenizer("hash"),
    keys.reply("api1"),
    keys.FORMER_LEASE,
    keys.CONTROL,
    keys.WAKE,
    *(key for key in keys.PERMANENT if key != keys.FOREIGN),
]


@pytest.mark.parametrize("key", BUILT)
def test_key_carries_the_hash_tag(key: str) -> None:
    assert key.startswith("{mtplx}:")


def test_keys_of_one_id_differ() -> None:
    assert len(set(BUILT)) == len(BUILT) - 1  # the interactive line is built and listed


@pytest.mark.parametrize("key", [keys.state("r1"), keys.rows("w1"), keys.daemon("w1"), keys.FORMER_LEASE])
def test_key_of_one_request_or_daemon_is_not_permanent(key: str) -> None:
    assert not keys.is_permanent(key)


@pytest.mark.parametrize("key", keys.PERMANENT)
def test_listed_key_is_permanent(key: str) -> None:
    assert keys.is_permanent(key)
