"""REGISTER, BEAT, RETIRE and LEASE, branch by branch, and what the registry reads. Redis: all three servers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from redis.asyncio import Redis

from broker import keys
from broker.registry import Registry
from broker.scripts import RECORD_TTL_MS, TOKENIZER_TTL_MS, Registration, Scripts
from broker.wire import Assignment, ModelCard, encode
from harness import factories as make
from harness.reads import read_counts, read_free_rows, read_waiting
from harness.running import accept, run_rows

CARD = ModelCard("tiny@0a1b", "tiny", "hash", 2048, 1, 100, (0,))


def served() -> Registration:
    """A worker's registration with model and tokenizer."""
    return replace(
        make.registration("w1"),
        model="tiny@0a1b",
        card=encode(CARD),
        tokenizer="hash",
        tokenizer_files={"tokenizer.json": b"{}", "chat_template.jinja": b"{{ x }}"},
    )


async def test_register_makes_a_worker_known(scripts: Scripts, registry: Registry) -> None:
    await scripts.register(make.registration("w1", free_tokens=100))

    [record] = await registry.workers()
    assert (record.id, record.lane, record.free_rows, record.free_tokens) == ("w1", make.lane(), 8, 100)
    assert (record.is_accepting, record.is_dead, record.beat) == (True, False, 0)


async def test_register_sets_free_rows_once_when_run_twice(scripts: Scripts, client: Redis) -> None:
    await run_rows(scripts, "r1")

    await scripts.register(make.registration("w1"))

    assert await read_free_rows(client, "w1") == 7


async def test_register_keeps_no_free_rows_for_other_daemons(scripts: Scripts, registry: Registry) -> None:
    await scripts.register(Registration("api1", {"kind": "api"}))

    [record] = await registry.daemons()
    assert (record.kind, record.lane, record.free_rows) == ("api", None, 0)
    assert await registry.workers() == []


async def test_register_stores_card_and_tokenizer(scripts: Scripts, registry: Registry, client: Redis) -> None:
    await scripts.register(served())

    assert await registry.cards() == {"tiny@0a1b": CARD}
    assert await registry.tokenizer_files("hash") == served().tokenizer_files
    assert 0 <= TOKENIZER_TTL_MS - await client.pttl(keys.tokenizer("hash")) < 60_000


async def test_register_gives_the_record_a_life(scripts: Scripts, client: Redis) -> None:
    await scripts.register(make.registration("w1"))

    assert 0 <= RECORD_TTL_MS - await client.pttl(keys.daemon("w1")) < 60_000


async def test_beat_counts_and_changes_fields(scripts: Scripts, registry: Registry) -> None:
    await scripts.register(make.registration("w1"))

    assert [await scripts.beat("w1", {"progress": 5, "active": 2}), await scripts.beat("w1", {})] == [1, 2]
    [record] = await registry.workers()
    assert (record.beat, record.progress, record.active_rows) == (2, 5, 2)


async def test_beat_refuses_a_daemon_without_a_record(scripts: Scripts, client: Redis) -> None:
    assert await scripts.beat("w1", {"progress": 5}) == 0
    assert not await cast("Any", client.exists(keys.daemon("w1")))


async def test_beat_refuses_a_daemon_that_was_declared_dead(scripts: Scripts) -> None:
    await run_rows(scripts, "r1")
    await scripts.retire("w1")

    assert await scripts.beat("w1", {"accepting": 1}) == 0


async def test_beat_prolongs_every_key_of_a_worker(scripts: Scripts, client: Redis) -> None:
    await run_rows(scripts, "r1")
    for key in (keys.daemon("w1"), keys.jobs("w1"), keys.rows("w1")):
        await client.pexpire(key, 60_000)

    await scripts.beat("w1", {})

    for key in (keys.daemon("w1"), keys.jobs("w1"), keys.rows("w1")):
        assert await client.pttl(key) > 60_000


async def test_beat_notes_when_a_model_was_last_served(scripts: Scripts, registry: Registry, client: Redis) -> None:
    await scripts.register(served())
    await client.pexpire(keys.tokenizer("hash"), 60_000)

    await scripts.beat("w1", {}, model="tiny@0a1b", tokenizer="hash")

    assert await registry.now_ms() - (await registry.last_seen_ms())["tiny@0a1b"] < 60_000
    assert await client.pttl(keys.tokenizer("hash")) > 60_000


async def test_retire_removes_a_daemon_without_rows(scripts: Scripts, registry: Registry, client: Redis) -> None:
    await scripts.register(make.registration("w1"))

    assert await scripts.retire("w1") == []
    assert await registry.daemons() == []
    assert not await cast("Any", client.exists(keys.daemon("w1"), keys.DAEMONS))


async def test_retire_first_names_the_rows_to_hand_back(scripts: Scripts, registry: Registry) -> None:
    seats = await run_rows(scripts, "r1", "r2")

    assert sorted(await scripts.retire("w1")) == sorted(seats)
    [record] = await registry.workers()
    assert (record.is_dead, record.is_accepting) == (True, False)


async def test_retire_removes_the_record_once_the_rows_are_handed_back(scripts: Scripts, client: Redis) -> None:
    await run_rows(scripts, "r1")
    await scripts.hand_back("w1", await scripts.retire("w1"), is_crash=True)

    assert await scripts.retire("w1") == []
    assert not await cast("Any", client.exists(keys.daemon("w1"), keys.jobs("w1"), keys.rows("w1")))
    assert await read_waiting(client, keys.WAIT_RETURNED) == ["r1"]


async def test_retire_names_the_rows_of_a_worker_whose_record_has_expired(scripts: Scripts, client: Redis) -> None:
    await run_rows(scripts, "r1")
    await client.delete(keys.daemon("w1"))

    assert await scripts.retire("w1") == [Assignment("r1", 1)]
    assert not await cast("Any", client.exists(keys.daemon("w1")))


async def test_retire_changes_nothing_when_run_twice(scripts: Scripts, client: Redis) -> None:
    await run_rows(scripts, "r1")

    assert await scripts.retire("w1") == await scripts.retire("w1")
    assert await read_counts(client, keys.rows("w1")) == {"r1": 1}


async def test_lease_is_given_to_one_holder(scripts: Scripts) -> None:
    assert await scripts.lease("f1", 60_000)
    assert not await scripts.lease("f2", 60_000)


async def test_lease_is_prolonged_for_its_holder(scripts: Scripts, client: Redis) -> None:
    await scripts.lease("f1", 60_000)

    assert await scripts.lease("f1", 120_000)
    assert await client.pttl(keys.FORMER_LEASE) > 60_000


async def test_lease_is_free_when_its_holder_lets_it_go(scripts: Scripts, client: Redis) -> None:
    await scripts.lease("f1", 60_000)
    await client.delete(keys.FORMER_LEASE)

    assert await scripts.lease("f2", 60_000)


async def test_registry_counts_load_and_rows_by_key(scripts: Scripts, registry: Registry) -> None:
    await run_rows(scripts, "r1")
    await accept(scripts, "r2")

    load = await registry.load()
    assert (load.requests, load.tokens, load.key_rows) == ({"interactive": 2}, {"interactive": 38}, {"": 1})


async def test_registry_leaves_out_records_it_cannot_read(scripts: Scripts, registry: Registry) -> None:
    await scripts.register(Registration("w1", {"kind": "worker", "lane": b"\xc1"}))

    assert await registry.daemons() == []


async def test_registry_counts_ends_by_priority_status_and_cause(scripts: Scripts, registry: Registry) -> None:
    await accept(scripts, "r1")
    await scripts.cancel("r1", "client")

    assert await registry.ended() == {"interactive:cancelled:client": 1}


async def test_model_is_seen_from_the_moment_its_worker_registers(scripts: Scripts, registry: Registry) -> None:
    registration = replace(make.registration("w1"), model=make.MODEL, card=b"card", tokenizer="t")

    await scripts.register(registration)

    assert make.MODEL in await registry.last_seen_ms()
