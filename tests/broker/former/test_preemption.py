"""Which offline rows give way, decided and carried out. Engine: none; Redis: none, or all three servers."""

from __future__ import annotations

from typing import Any, cast

from redis.asyncio import Redis

from broker import keys
from broker.former.capacity import Waiting
from broker.former.daemon import Former
from broker.former.preemption import BusyWorker, OfflineRow, PreemptionRules, give_way, places_of
from broker.scripts import DEFAULT_BOUNDS, RowCommit, Scripts
from broker.wire import Assignment, pack_tokens
from harness import factories as make
from harness.reads import read_jobs, read_status, read_waiting

NOW_MS = 1_000_000
RULES = PreemptionRules(NOW_MS, offline_age_ms=600_000, min_run_ms=5000)


def row(
    request_id: str, *, committed: int = 0, attempt: int = 1, formed_ms: int = 0, accepted_ms: int = NOW_MS - 1000
) -> OfflineRow:
    return OfflineRow("w1", Assignment(request_id, attempt), 19, committed, accepted_ms, formed_ms)


def interactive(*request_ids: str, **ticket: Any) -> list[Waiting]:
    return [
        make.waiting(request_id, ordinal=place, ticket=make.ticket(request_id, **ticket))
        for place, request_id in enumerate(request_ids, 1)
    ]


def yielded(unplaced: list[Waiting], rows: list[OfflineRow], **changes: Any) -> list[str]:
    rules = changes.pop("rules", RULES)
    key_rows = changes.pop("key_rows", {})
    held = changes.pop("held", None)
    view = make.view("w1", free_rows=changes.pop("free_rows", 0), **changes)
    crowd = BusyWorker(view, tuple(rows), held)
    return [each.seat.request_id for each in give_way(unplaced, [crowd], rules=rules, key_rows=key_rows)]


def test_worker_that_cannot_pause_returns_rows_with_the_fewest_tokens_one_for_each_request() -> None:
    rows = [row("much", committed=90), row("little", committed=2), row("some", committed=20)]

    assert yielded(interactive("a", "b"), rows) == ["little", "some"]


def test_worker_that_can_pause_returns_no_row_while_memory_lasts() -> None:
    assert yielded(interactive("a", "b"), [row("r"), row("s")], held=0) == []
    assert yielded(interactive("a"), [row("r")], held=0, free_tokens=19) == []


def test_rows_are_returned_until_there_is_memory_those_with_the_fewest_tokens_first() -> None:
    rows = [row("much", committed=90), row("little", committed=2), row("some", committed=20)]
    long = interactive("a", max_tokens=30)

    assert yielded(long, rows, held=0, free_tokens=0) == ["little", "some"]
    assert yielded(long, rows, held=0, free_tokens=20) == ["little"]
    assert yielded(interactive("a", max_tokens=80), rows, held=0, free_tokens=0) == []


def test_no_row_is_returned_for_a_place_that_no_row_may_give() -> None:
    """All rows were paused a moment ago, or have aged: more memory would not help."""
    assert yielded(interactive("a"), [row("r")], held=1, free_tokens=0) == []
    assert yielded(interactive("a"), [row("r", accepted_ms=NOW_MS - 600_000)], held=0, free_tokens=0) == []


def places(rows: list[OfflineRow], *, free_rows: int, held: int | None) -> int:
    return places_of(BusyWorker(make.view("w1", free_rows=free_rows), tuple(rows), held), RULES).free_rows


def test_rows_that_can_be_paused_are_as_good_as_free_to_interactive_work() -> None:
    rows = [row("r"), row("s"), row("aged", accepted_ms=NOW_MS - 600_000)]

    assert places(rows, free_rows=0, held=0) == 2
    assert places(rows, free_rows=-1, held=0) == 1
    assert places(rows, free_rows=0, held=1) == 1
    assert places(rows, free_rows=1, held=9) == 1
    assert places(rows, free_rows=0, held=None) == 0


def test_no_row_gives_way_when_a_free_one_fits() -> None:
    assert yielded(interactive("a"), [row("r")], free_rows=1) == []


def test_row_that_has_aged_stays() -> None:
    assert yielded(interactive("a"), [row("r", accepted_ms=NOW_MS - 600_000)]) == []


def test_row_that_gave_way_a_moment_ago_stays() -> None:
    assert yielded(interactive("a"), [row("r", attempt=2, formed_ms=NOW_MS - 4999)]) == []
    assert yielded(interactive("a"), [row("r", attempt=2, formed_ms=NOW_MS - 5000)]) == ["r"]


def test_row_of_another_model_is_of_no_use() -> None:
    assert yielded(interactive("a", model="other@1"), [row("r")]) == []


def test_request_that_would_not_fit_the_memory_takes_nothing() -> None:
    assert yielded(interactive("a", max_tokens=30), [row("r")], free_tokens=0) == []
    assert yielded(interactive("a"), [row("r")], free_tokens=0) == ["r"]


def test_request_whose_key_has_its_rows_takes_nothing() -> None:
    rules = PreemptionRules(NOW_MS, 600_000, 5000, rows_per_key=1)

    assert yielded(interactive("a", key_id="k"), [row("r")], rules=rules, key_rows={"k": 1}) == []
    assert yielded(interactive("a", "b", key_id="k"), [row("r"), row("s")], rules=rules) == ["r"]


async def fill(scripts: Scripts, *request_ids: str, can_pause: bool = False) -> None:
    """A worker all of whose rows are offline; the first has committed most."""
    await scripts.register(make.registration("w1", free_rows=len(request_ids)))
    if can_pause:
        await scripts.beat("w1", {"held": 0})
    for request_id in request_ids:
        ticket = make.ticket(request_id, priority="offline")
        await scripts.accept(make.submission(request_id, ticket=ticket), DEFAULT_BOUNDS)
    await scripts.form("w1", "c1", request_ids)
    await scripts.commit("w1", [RowCommit(Assignment(request_ids[0], 1), 0, pack_tokens([1, 2, 3]))], {})


async def test_former_gives_an_interactive_request_the_row_of_an_offline_one(
    former: Former, scripts: Scripts, client: Redis
) -> None:
    await fill(scripts, "o1", "o2")
    await scripts.accept(make.submission("i1"), DEFAULT_BOUNDS)

    await former.step()
    await former.step()

    assert await read_waiting(client, keys.WAIT_RETURNED) == ["o2"]
    assert await read_status(client, "i1") == "running"
    assert (await read_jobs(client, "w1"))[-1] == [Assignment("i1", 1)]


async def test_worker_learns_with_its_next_commit_that_a_row_gave_way(former: Former, scripts: Scripts) -> None:
    await fill(scripts, "o1", "o2")
    await scripts.accept(make.submission("i1"), DEFAULT_BOUNDS)
    await former.step()

    result = await scripts.commit("w1", [RowCommit(Assignment("o2", 1), 0, pack_tokens([4]))], {})

    assert [(refusal.request_id, refusal.why) for refusal in result.refused] == [("o2", "lost")]


async def test_row_that_gave_way_goes_on_when_a_row_is_free_again(
    former: Former, scripts: Scripts, client: Redis
) -> None:
    await fill(scripts, "o1", "o2")
    await scripts.accept(make.submission("i1"), DEFAULT_BOUNDS)
    await former.step()
    await former.step()
    await scripts.hand_back("w1", [Assignment("i1", 1)], is_crash=False)
    await scripts.cancel("i1", "client")

    await former.step()

    assert (await read_jobs(client, "w1"))[-1] == [Assignment("o2", 2)]
    assert int(await cast("Any", client.hget(keys.state("o2"), "crashes"))) == 0


async def test_offline_work_never_makes_offline_work_give_way(former: Former, scripts: Scripts, client: Redis) -> None:
    await fill(scripts, "o1")
    ticket = make.ticket("o2", priority="offline")
    await scripts.accept(make.submission("o2", ticket=ticket), DEFAULT_BOUNDS)

    await former.step()

    assert await read_status(client, "o1") == "running"
    assert await read_waiting(client, keys.WAIT_OFFLINE) == ["o2"]


async def test_former_sends_an_interactive_request_to_a_full_worker_that_can_pause(
    former: Former, scripts: Scripts, client: Redis
) -> None:
    await fill(scripts, "o1", "o2", can_pause=True)
    await scripts.accept(make.submission("i1"), DEFAULT_BOUNDS)

    await former.step()

    assert (await read_jobs(client, "w1"))[-1] == [Assignment("i1", 1)]
    assert [await read_status(client, name) for name in ("i1", "o1", "o2")] == ["running"] * 3
    assert await read_waiting(client, keys.WAIT_RETURNED) == []


async def test_former_prefers_a_worker_with_a_free_row_to_one_that_must_pause(
    former: Former, scripts: Scripts, client: Redis
) -> None:
    await fill(scripts, "o1", can_pause=True)
    await scripts.register(make.registration("w2", free_rows=1))
    await scripts.accept(make.submission("i1"), DEFAULT_BOUNDS)

    await former.step()

    assert await read_jobs(client, "w2") == [[Assignment("i1", 1)]]


async def test_former_waits_while_every_row_is_interactive_paused_or_aged(
    former: Former, scripts: Scripts, client: Redis
) -> None:
    await fill(scripts, "o1", "o2", can_pause=True)
    await cast("Any", client.hset(keys.state("o1"), "accepted_ms", 1))
    for name in ("i1", "i2"):
        await scripts.accept(make.submission(name), DEFAULT_BOUNDS)

    sent = [await former.step() for _ in range(3)]

    assert sent == [1, 0, 0]
    assert await read_waiting(client, keys.WAIT_INTERACTIVE) == ["i2"]
    assert await read_waiting(client, keys.WAIT_RETURNED) == []


async def test_former_hands_a_row_back_where_memory_is_short(former: Former, scripts: Scripts, client: Redis) -> None:
    await fill(scripts, "o1", "o2", can_pause=True)
    await cast("Any", client.hset(keys.daemon("w1"), "free_tokens", 0))
    await scripts.accept(make.submission("i1"), DEFAULT_BOUNDS)

    await former.step()
    await former.step()

    assert await read_waiting(client, keys.WAIT_RETURNED) == ["o2"]
    assert await read_status(client, "i1") == "running"
