"""Records of batches and files, and the runner's lease. Engine: none; Redis: all three servers."""

from __future__ import annotations

from typing import Any, cast

import pytest
from redis.asyncio import Redis

from broker import keys
from broker.batches import BatchDesk, FileRecord
from broker.scripts import DEFAULT_BOUNDS, Scripts
from broker.wire import Failed
from harness import factories as make
from harness.reads import read_end, read_state
from harness.wait import wait_until

FIELDS: dict[str, str | int] = {
    "key_id": "alice",
    "endpoint": "/v1/completions",
    "input_file_id": "file-1",
    "completion_window": "24h",
    "metadata": '{"number": "12"}',
}


@pytest.fixture
def desk(client: Redis) -> BatchDesk:
    return BatchDesk(client)


async def begin(desk: BatchDesk, batch_id: str = "batch_1", *, window_s: int = 60) -> None:
    await desk.new_batch(batch_id, FIELDS, window_s=window_s, keep_s=60)


def file_record(file_id: str, *, created_s: int, keep_s: int = 60) -> FileRecord:
    return FileRecord(
        id=file_id,
        key_id="alice",
        bytes=3,
        created_s=created_s,
        expires_s=created_s + keep_s,
        filename="in.jsonl",
        purpose="batch",
    )


async def test_new_batch_is_validating_open_and_listed(desk: BatchDesk) -> None:
    await begin(desk)

    record = await desk.batch("batch_1")

    assert record is not None
    assert (record.status, record.metadata, record.total) == ("validating", '{"number": "12"}', 0)
    assert record.expires_at == record.created_at + 60
    assert [each.id for each in await desk.open_batches()] == ["batch_1"]
    assert (await desk.page(keys.batches("alice"), after=None, limit=5)).ids == ["batch_1"]


async def test_new_batch_twice_keeps_the_first(desk: BatchDesk) -> None:
    await begin(desk)
    await desk.move("batch_1", "in_progress", come_from=["validating"])

    await begin(desk)

    record = await desk.batch("batch_1")
    assert record is not None
    assert record.status == "in_progress"


async def test_move_notes_the_time_and_the_fields(desk: BatchDesk) -> None:
    await begin(desk)

    status = await desk.move("batch_1", "in_progress", come_from=["validating"], fields={"total": 7, "model": "12"})

    record = await desk.batch("batch_1")
    assert record is not None
    assert (status, record.total, record.model) == ("in_progress", 7, "12")
    assert record.in_progress_at is not None


async def test_move_from_another_status_changes_nothing(desk: BatchDesk) -> None:
    await begin(desk)

    assert await desk.move("batch_1", "completed", come_from=["finalizing"]) == "validating"


async def test_final_move_closes_the_batch(desk: BatchDesk) -> None:
    await begin(desk)

    await desk.move("batch_1", "failed", come_from=["validating"])

    assert await desk.open_batches() == []


async def test_move_by_a_runner_that_lost_its_lease_is_refused(desk: BatchDesk) -> None:
    await begin(desk)
    await desk.beat("batch_1", "second", lease_ms=60_000, fields={})

    assert await desk.move("batch_1", "in_progress", come_from=["validating"], runner="first") == "lost"


async def test_move_of_an_unknown_batch_says_so(desk: BatchDesk) -> None:
    assert await desk.move("batch_1", "failed", come_from=["validating"]) == ""


async def test_cancel_ends_a_batch_that_no_runner_has_begun(desk: BatchDesk) -> None:
    await begin(desk)

    assert await desk.cancel("batch_1") == "cancelled"
    assert await desk.open_batches() == []


async def test_cancel_leaves_the_end_to_the_runner_that_has_it(desk: BatchDesk) -> None:
    await begin(desk)
    await desk.beat("batch_1", "runner", lease_ms=60_000, fields={})

    assert await desk.cancel("batch_1") == "cancelling"


async def test_cancel_of_an_ended_batch_changes_nothing(desk: BatchDesk) -> None:
    await begin(desk)
    await desk.move("batch_1", "failed", come_from=["validating"])

    assert await desk.cancel("batch_1") == "failed"
    assert await desk.cancel("batch_2") == ""


async def test_second_runner_gets_the_batch_when_the_first_leaves(desk: BatchDesk) -> None:
    await begin(desk)
    await desk.beat("batch_1", "first", lease_ms=60_000, fields={})
    refused = await desk.beat("batch_1", "second", lease_ms=60_000, fields={})

    await desk.leave("batch_1", "first")
    taken = await desk.beat("batch_1", "second", lease_ms=60_000, fields={"completed": 3})

    assert (refused.status, taken.status) == ("lost", "validating")
    record = await desk.batch("batch_1")
    assert record is not None
    assert record.completed == 3


async def test_second_runner_gets_the_batch_when_the_lease_ran_out(desk: BatchDesk) -> None:
    await begin(desk)
    await desk.beat("batch_1", "first", lease_ms=1, fields={})

    async def is_taken() -> bool:
        return (await desk.beat("batch_1", "second", lease_ms=60_000, fields={})).status == "validating"

    await wait_until(is_taken, "the lease ran out")


async def test_beat_of_an_unknown_batch_makes_no_lease(desk: BatchDesk, client: Redis) -> None:
    assert (await desk.beat("batch_1", "runner", lease_ms=60_000, fields={})).status == ""
    assert await client.exists(keys.batch_lease("batch_1")) == 0


async def test_page_goes_on_after_an_id(desk: BatchDesk, client: Redis) -> None:
    index = keys.files("alice")
    for place in range(1, 6):
        await desk.put_file(file_record(f"file-{place}", created_s=1))
        await cast("Any", client.zadd(index, {f"file-{place}": place}))  # as if a moment had passed between them

    first = await desk.page(index, after=None, limit=2)
    second_page = await desk.page(index, after="file-4", limit=9)
    upwards = await desk.page(index, after="file-1", limit=2, is_newest_first=False)

    assert (first.ids, second_page.ids) == (["file-5", "file-4"], ["file-3", "file-2", "file-1"])
    assert upwards.ids == ["file-2", "file-3"]
    assert not (await desk.page(index, after="file-9", limit=2)).is_known


async def test_list_of_files_does_not_grow_where_files_come_and_expire_and_nobody_lists_them(
    desk: BatchDesk, client: Redis
) -> None:
    lengths = []
    for place in range(20):
        await desk.put_file(file_record(f"file-{place}", created_s=1))
        lengths.append(int(await cast("Any", client.zcard(keys.files("alice")))))
        await client.delete(keys.file(f"file-{place}"))

    assert set(lengths) == {1}


async def test_dropped_file_is_gone_everywhere(desk: BatchDesk) -> None:
    record = file_record("file-1", created_s=1)
    await desk.put_file(record)

    await desk.drop_file(record)

    assert await desk.file("file-1") is None
    assert (await desk.page(keys.files("alice"), after=None, limit=2)).ids == []
    assert await desk.ended_files() == []


async def test_ended_file_is_named_until_its_content_was_removed(desk: BatchDesk) -> None:
    await desk.put_file(file_record("file-1", created_s=1))

    named = await desk.ended_files()
    await desk.forget_ended_file("file-1")

    assert (named, await desk.ended_files()) == (["file-1"], [])


async def test_forget_takes_ended_requests_and_spares_the_others(
    desk: BatchDesk, scripts: Scripts, client: Redis
) -> None:
    for request_id in ("r1", "r2"):
        await scripts.accept(make.submission(request_id), DEFAULT_BOUNDS)
    await scripts.cancel("r1", "client")

    assert await desk.forget(["r1", "r2", "r3"]) == 1
    assert set(await read_state(client, "r1")) == {"status", "digest", "ordinal", "forgotten", "end"}
    assert (await read_state(client, "r2"))["status"] == b"waiting"
    assert await desk.forget(["r1"]) == 0


async def test_forgotten_request_is_not_run_again_when_it_is_submitted_late(
    desk: BatchDesk, scripts: Scripts, client: Redis
) -> None:
    await scripts.accept(make.submission("r1"), DEFAULT_BOUNDS)
    await scripts.cancel("r1", "client")
    await desk.forget(["r1"])

    again = await scripts.accept(make.submission("r1"), DEFAULT_BOUNDS)

    assert not again.is_new
    end = await read_end(client, "r1")
    assert isinstance(end, Failed)
    assert end.code == "forgotten"
