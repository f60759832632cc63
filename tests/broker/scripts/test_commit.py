"""COMMIT, branch by branch. Engine: none; Redis: all three servers."""

from __future__ import annotations

from typing import Any, cast

from redis.asyncio import Redis

from broker import keys
from broker.scripts import DEFAULT_BOUNDS, CommitResult, Refusal, RowCommit, Scripts
from broker.wire import Assignment, Logprob, encode, pack_tokens
from harness import factories as make
from harness.channels import listening
from harness.reads import read_log
from harness.redis_servers import Server
from harness.running import run_rows

OK = CommitResult()


def tokens_of(seat: Assignment, position: int, *tokens: int) -> RowCommit:
    return RowCommit(seat, position, pack_tokens(tokens))


async def test_commit_appends_the_tokens_of_every_row(scripts: Scripts, client: Redis) -> None:
    first, second = await run_rows(scripts, "r1", "r2")

    result = await scripts.commit("w1", [tokens_of(first, 0, 7, 8), tokens_of(second, 0, 9)], {})

    assert result == OK
    assert (await read_log(client, "r1"), await read_log(client, "r2")) == ((7, 8), (9,))


async def test_commit_appends_nothing_when_run_twice(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")
    await scripts.commit("w1", [tokens_of(seat, 0, 7, 8)], {})

    again = await scripts.commit("w1", [tokens_of(seat, 0, 7, 8)], {})

    assert again == OK
    assert await read_log(client, "r1") == (7, 8)


async def test_commit_appends_the_rest_when_the_overlap_is_equal(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")
    await scripts.commit("w1", [tokens_of(seat, 0, 7, 8)], {})

    await scripts.commit("w1", [tokens_of(seat, 1, 8, 9, 10)], {})

    assert await read_log(client, "r1") == (7, 8, 9, 10)


async def test_commit_takes_what_lies_wholly_inside_the_log(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")
    await scripts.commit("w1", [tokens_of(seat, 0, 7, 8, 9)], {})

    assert await scripts.commit("w1", [tokens_of(seat, 1, 8)], {}) == OK
    assert await read_log(client, "r1") == (7, 8, 9)


async def test_commit_refuses_tokens_that_differ_from_the_log(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")
    await scripts.commit("w1", [tokens_of(seat, 0, 7, 8)], {})

    result = await scripts.commit("w1", [tokens_of(seat, 1, 5, 6)], {})

    assert result.refused == (Refusal("r1", "diverged", 2),)
    assert await read_log(client, "r1") == (7, 8)


async def test_commit_refuses_a_gap_and_names_the_length(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")
    await scripts.commit("w1", [tokens_of(seat, 0, 7)], {})

    result = await scripts.commit("w1", [tokens_of(seat, 3, 9)], {})

    assert result.refused == (Refusal("r1", "short", 1),)
    assert await read_log(client, "r1") == (7,)


async def test_commit_writes_nothing_when_one_row_is_refused(scripts: Scripts, client: Redis, server: Server) -> None:
    first, second = await run_rows(scripts, "r1", "r2")

    async with listening(server, "channel") as ear:
        rows = [tokens_of(first, 0, 7), tokens_of(second, 1, 9)]
        result = await scripts.commit("w1", rows, {"channel": b"must not be heard"})
        await client.publish("channel", b"mark")

        assert result.refused == (Refusal("r2", "short", 0),)
        assert await ear.hear() == b"mark"
    assert await read_log(client, "r1") == ()


async def test_commit_refuses_another_worker(scripts: Scripts) -> None:
    [seat] = await run_rows(scripts, "r1")

    assert (await scripts.commit("w2", [tokens_of(seat, 0, 7)], {})).refused == (Refusal("r1", "lost", 0),)


async def test_commit_refuses_an_older_attempt(scripts: Scripts) -> None:
    [seat] = await run_rows(scripts, "r1")
    await scripts.hand_back("w1", [seat], is_crash=False)
    await scripts.form("w1", "c2", ["r1"])

    assert (await scripts.commit("w1", [tokens_of(seat, 0, 7)], {})).refused == (Refusal("r1", "lost", 0),)


async def test_commit_refuses_a_request_that_waits_again(scripts: Scripts) -> None:
    [seat] = await run_rows(scripts, "r1")
    await scripts.hand_back("w1", [seat], is_crash=False)

    assert (await scripts.commit("w1", [tokens_of(seat, 0, 7)], {})).refused == (Refusal("r1", "lost", 0),)


async def test_commit_refuses_a_request_that_is_unknown(scripts: Scripts) -> None:
    assert (await scripts.commit("w1", [tokens_of(Assignment("r1", 1), 0, 7)], {})).refused == (
        Refusal("r1", "lost", 0),
    )


async def test_commit_names_rows_that_somebody_cancelled(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")
    await scripts.cancel("r1", "client")

    result = await scripts.commit("w1", [tokens_of(seat, 0, 7)], {})

    assert result.wanted_ends == {"r1": "client"}
    assert await read_log(client, "r1") == (7,)


async def test_commit_names_rows_past_their_deadline(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")
    await cast("Any", client.hset(keys.state("r1"), "deadline_ms", "1"))

    assert (await scripts.commit("w1", [RowCommit(seat, 0)], {})).wanted_ends == {"r1": "deadline"}


async def test_commit_writes_no_log_for_a_row_in_prefill(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")

    assert await scripts.commit("w1", [RowCommit(seat, 0)], {}) == OK
    assert not await cast("Any", client.exists(keys.log("r1")))


async def test_commit_keeps_one_logprob_per_token_over_an_overlap(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")
    blobs = [encode(Logprob(-float(i))) for i in range(3)]

    await scripts.commit("w1", [RowCommit(seat, 0, pack_tokens([7, 8]), blobs[:2])], {})
    await scripts.commit("w1", [RowCommit(seat, 1, pack_tokens([8, 9]), blobs[1:])], {})

    assert await cast("Any", client.lrange(keys.logprobs("r1"), 0, -1)) == blobs


async def test_commit_gives_log_and_logprobs_the_life_of_the_state(scripts: Scripts, client: Redis) -> None:
    [seat] = await run_rows(scripts, "r1")

    await scripts.commit("w1", [RowCommit(seat, 0, pack_tokens([7]), [encode(Logprob(-1.0))])], {})

    lives = [await client.pttl(key) for key in (keys.state("r1"), keys.log("r1"), keys.logprobs("r1"))]
    assert max(lives) - min(lives) < 60_000


async def test_commit_publishes_one_message_per_channel(scripts: Scripts, server: Server) -> None:
    [seat] = await run_rows(scripts, "r1")

    async with listening(server, "a") as first, listening(server, "b") as second:
        await scripts.commit("w1", [tokens_of(seat, 0, 7)], {"a": b"one", "b": b"two"})

        assert (await first.hear(), await second.hear()) == (b"one", b"two")


async def test_commit_keeps_a_log_of_full_32_bit_ids_after_a_request_is_run_again(
    scripts: Scripts, client: Redis
) -> None:
    [seat] = await run_rows(scripts, "r1")
    await scripts.commit("w1", [tokens_of(seat, 0, 2**32 - 1, 0)], {})
    await scripts.hand_back("w1", [seat], is_crash=True)
    await scripts.register(make.registration("w2"))
    await scripts.form("w2", "c2", ["r1"])

    result = await scripts.commit("w2", [tokens_of(Assignment("r1", 2), 2, 65_536)], {})

    assert result == OK
    assert await read_log(client, "r1") == (2**32 - 1, 0, 65_536)


async def test_commit_ends_no_request_by_itself(scripts: Scripts) -> None:
    [seat] = await run_rows(scripts, "r1")
    await scripts.cancel("r1", "operator")
    await scripts.commit("w1", [tokens_of(seat, 0, 7)], {})

    assert (await scripts.commit("w1", [tokens_of(seat, 1, 8)], {})).wanted_ends == {"r1": "operator"}
    assert (await scripts.accept(make.submission("r1"), DEFAULT_BOUNDS)).is_new is False
