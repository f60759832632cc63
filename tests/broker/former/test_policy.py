"""The forming policy, case by case. Engine: none; Redis: none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from broker.former.capacity import Waiting, WorkerState
from broker.former.fair_share import FairShare
from broker.former.policy import FormingPlan, PolicyConfig, plan
from broker.wire import Ticket
from harness import factories as make

NOW_MS = 1_000_000


def line(*tickets: Ticket, accepted_ms: int = NOW_MS - 1000) -> list[Waiting]:
    """Waiting requests in the order of their acceptance."""
    return [Waiting(ticket, ordinal, accepted_ms) for ordinal, ticket in enumerate(tickets, 1)]


def planned(
    waiting: Sequence[Waiting],
    *workers: WorkerState,
    config: PolicyConfig | None = None,
    shares: FairShare | None = None,
    key_rows: dict[str, int] | None = None,
) -> FormingPlan:
    return plan(waiting, workers, now_ms=NOW_MS, config=config or PolicyConfig(), shares=shares, key_rows=key_rows)


def sent(result: FormingPlan) -> dict[str, list[str]]:
    """Request ids by worker."""
    return {cohort.worker_id: cohort.request_ids for cohort in result.cohorts}


def test_policy_sends_what_waits_together() -> None:
    assert sent(planned(line(make.ticket("r1"), make.ticket("r2")), make.view("w1"))) == {"w1": ["r1", "r2"]}


def test_policy_sends_nothing_without_workers() -> None:
    assert planned(line(make.ticket("r1"))) == FormingPlan()


def test_policy_sends_nothing_to_a_worker_without_free_rows() -> None:
    assert planned(line(make.ticket("r1")), make.view("w1", free_rows=0)) == FormingPlan()


def test_policy_matches_model_and_profile() -> None:
    waiting = line(make.ticket("r1", model="other@1"), make.ticket("r2"))

    assert sent(planned(waiting, make.view("w1"))) == {"w1": ["r2"]}


def test_policy_leaves_a_request_whose_wire_version_the_worker_does_not_read() -> None:
    waiting = line(make.ticket("r1", min_wire=2), make.ticket("r2"))

    assert sent(planned(waiting, make.view("w1"))) == {"w1": ["r2"]}
    assert sent(planned(waiting[:1], make.view("w2", lane=make.lane(wire=2)))) == {"w2": ["r1"]}


def test_policy_leaves_what_exceeds_the_context() -> None:
    waiting = line(make.ticket("r1", prompt_tokens=60, max_tokens=5), make.ticket("r2", prompt_tokens=60, max_tokens=4))

    assert sent(planned(waiting, make.view("w1", lane=make.lane(max_context_tokens=64)))) == {"w1": ["r2"]}


def test_policy_leaves_what_exceeds_the_free_cache_slots() -> None:
    waiting = line(*(make.ticket(name) for name in ("r1", "r2", "r3")))

    assert sent(planned(waiting, make.view("w1", free_tokens=40))) == {"w1": ["r1", "r2"]}


def test_policy_sends_a_smaller_request_when_the_first_does_not_fit() -> None:
    waiting = line(make.ticket("r1", max_tokens=100), make.ticket("r2"))

    assert sent(planned(waiting, make.view("w1", free_tokens=50))) == {"w1": ["r2"]}


def test_policy_sends_older_requests_first() -> None:
    waiting = line(*(make.ticket(f"r{i}") for i in range(5)))

    assert sent(planned(list(reversed(waiting)), make.view("w1", free_rows=2))) == {"w1": ["r0", "r1"]}


def test_policy_sends_interactive_before_offline() -> None:
    waiting = line(make.ticket("r1", priority="offline"), make.ticket("r2"))

    assert sent(planned(waiting, make.view("w1", free_rows=1))) == {"w1": ["r2"]}


def test_policy_fills_rows_that_nobody_else_wants_with_offline_work() -> None:
    waiting = line(*(make.ticket(f"r{i}", priority="offline") for i in range(9)))

    assert len(sent(planned(waiting, make.view("w1"), config=PolicyConfig(offline_share=0.25)))["w1"]) == 8


def test_policy_sends_aged_offline_work_before_interactive_work() -> None:
    [offline] = line(make.ticket("r1", priority="offline"), accepted_ms=NOW_MS - 600_000)
    fresh = replace(make.waiting("r2", ordinal=2), accepted_ms=NOW_MS)

    assert sent(planned([offline, fresh], make.view("w1", free_rows=1))) == {"w1": ["r1"]}


def test_policy_lets_aged_offline_work_go_first_up_to_its_share() -> None:
    aged = line(*(make.ticket(f"o{i}", priority="offline") for i in range(8)), accepted_ms=0)
    fresh = [Waiting(make.ticket(f"i{i}"), 100 + i, NOW_MS) for i in range(4)]

    result = sent(planned([*aged, *fresh], make.view("w1"), config=PolicyConfig(offline_share=0.25)))

    assert result == {"w1": ["o0", "o1", "i0", "i1", "i2", "i3", "o2", "o3"]}


def test_policy_counts_running_offline_rows_against_the_share() -> None:
    aged = line(make.ticket("o1", priority="offline"), accepted_ms=0)
    fresh = [Waiting(make.ticket("i1"), 100, NOW_MS)]
    worker = replace(make.view("w1", free_rows=1), offline_rows=2)

    assert sent(planned([*aged, *fresh], worker, config=PolicyConfig(offline_share=0.25))) == {"w1": ["i1"]}


def test_policy_serves_returned_interactive_requests_first_by_ordinal() -> None:
    waiting = line(*(make.ticket(f"r{i}") for i in range(4)))
    waiting[2], waiting[3] = replace(waiting[2], is_returned=True), replace(waiting[3], is_returned=True)

    assert sent(planned(waiting, make.view("w1", free_rows=3))) == {"w1": ["r2", "r3", "r0"]}


def test_policy_serves_returned_offline_requests_after_interactive_ones() -> None:
    offline, interactive = line(make.ticket("r1", priority="offline"), make.ticket("r2"))

    assert sent(planned([replace(offline, is_returned=True), interactive], make.view("w1", free_rows=1))) == {
        "w1": ["r2"]
    }


def test_policy_takes_turns_between_api_keys() -> None:
    flood = [make.ticket(f"a{i}", key_id="a") for i in range(10)]

    result = sent(planned(line(*flood, make.ticket("b0", key_id="b")), make.view("w1", free_rows=3)))

    assert result == {"w1": ["a0", "b0", "a1"]}


def test_policy_takes_turns_by_tokens_and_not_by_requests() -> None:
    long = [make.ticket(f"a{i}", key_id="a", prompt_tokens=100, max_tokens=100) for i in range(4)]
    short = [make.ticket(f"b{i}", key_id="b", prompt_tokens=10, max_tokens=10) for i in range(20)]

    result = sent(planned(line(*long, *short), make.view("w1", lane=make.lane(decode_batch_max=16), free_rows=12)))

    assert [name[0] for name in result["w1"]].count("b") == 10


def test_policy_remembers_what_a_key_had_before() -> None:
    shares = FairShare()
    shares.charge("a", 1000)

    result = sent(
        planned(
            line(make.ticket("r1", key_id="a"), make.ticket("r2", key_id="b")),
            make.view("w1", free_rows=1),
            shares=shares,
        )
    )

    assert result == {"w1": ["r2"]}
    assert shares.start("b") == 0


def test_policy_keeps_to_the_rows_of_a_key() -> None:
    waiting = line(*(make.ticket(f"a{i}", key_id="a") for i in range(4)), make.ticket("b0", key_id="b"))

    result = sent(planned(waiting, make.view("w1"), config=PolicyConfig(rows_per_key=2), key_rows={"a": 1}))

    assert result == {"w1": ["a0", "b0"]}


def test_policy_bounds_no_rows_of_requests_without_a_key() -> None:
    waiting = line(*(make.ticket(f"r{i}") for i in range(4)))

    assert len(sent(planned(waiting, make.view("w1"), config=PolicyConfig(rows_per_key=1)))["w1"]) == 4


def test_policy_spreads_requests_over_workers() -> None:
    waiting = line(*(make.ticket(f"r{i}") for i in range(4)))

    result = sent(planned(waiting, make.view("w1"), make.view("w2")))

    assert {worker_id: len(ids) for worker_id, ids in result.items()} == {"w1": 2, "w2": 2}


def test_policy_sends_to_the_emptiest_worker() -> None:
    assert sent(planned(line(make.ticket("r1")), make.view("w1", free_rows=2), make.view("w2", free_rows=5))) == {
        "w2": ["r1"]
    }


def test_policy_puts_like_lengths_together() -> None:
    lengths = [10, 1000, 20, 1010, 30, 1020]
    waiting = line(*(make.ticket(f"r{length}", max_tokens=length) for length in lengths))

    result = sent(planned(waiting, make.view("w1"), make.view("w2")))

    assert sorted(sorted(ids) for ids in result.values()) == [["r10", "r20", "r30"], ["r1000", "r1010", "r1020"]]


def test_policy_keeps_the_long_context_for_long_requests() -> None:
    short, long = make.ticket("r1"), make.ticket("r2", max_tokens=3000)
    workers = [
        make.view("big", lane=make.lane(max_context_tokens=4096), free_rows=1),
        make.view("small", lane=make.lane(max_context_tokens=512), free_rows=1),
    ]

    assert sent(planned(line(short, long), *workers)) == {"small": ["r1"], "big": ["r2"]}


def suspects(count: int) -> list[Waiting]:
    return [replace(each, crashes=1, is_returned=True) for each in line(*(make.ticket(f"s{i}") for i in range(count)))]


def test_policy_sends_one_suspect_at_a_time_to_a_worker_and_nobody_with_it() -> None:
    innocent = Waiting(make.ticket("r9"), 9, NOW_MS)

    result = sent(planned([*suspects(3), innocent], make.view("w1"), make.view("w2")))

    assert result == {"w1": ["s0"], "w2": ["s1"]}


def test_policy_sends_nobody_to_a_worker_that_runs_a_suspect() -> None:
    waiting = [*suspects(1), Waiting(make.ticket("r9"), 9, NOW_MS)]

    assert planned(waiting, replace(make.view("w1"), has_suspect=True)) == FormingPlan()


def test_policy_sends_a_suspect_only_beside_rows_that_have_proven_themselves() -> None:
    proven, unproven = make.view("w1", free_rows=2), replace(make.view("w2", free_rows=6), unproven_rows=1)

    assert sent(planned(suspects(1), proven, unproven)) == {"w1": ["s0"]}


def test_policy_keeps_a_worker_for_a_suspect_until_its_rows_have_proven_themselves() -> None:
    innocent = Waiting(make.ticket("r9"), 9, NOW_MS)
    nearly, busy = replace(make.view("w1"), unproven_rows=1), replace(make.view("w2"), unproven_rows=5)

    assert sent(planned([*suspects(2), innocent], nearly, busy)) == {"w2": ["r9"]}


def test_policy_serves_an_offline_suspect_before_others_can_take_its_place() -> None:
    [suspect] = suspects(1)
    offline = replace(suspect, ticket=make.ticket("s0", priority="offline"))
    interactive = Waiting(make.ticket("r9"), 9, NOW_MS)

    assert sent(planned([interactive, offline], make.view("w1"))) == {"w1": ["s0"]}


def test_policy_holds_a_cohort_for_company_and_says_until_when() -> None:
    waiting = line(make.ticket("r1"), accepted_ms=NOW_MS - 5)

    assert planned(waiting, make.view("w1"), config=PolicyConfig(batch_wait_ms=20)) == FormingPlan((), NOW_MS + 15)


def test_policy_lets_a_cohort_go_when_it_has_waited() -> None:
    waiting = line(make.ticket("r1"), accepted_ms=NOW_MS - 20)

    assert sent(planned(waiting, make.view("w1"), config=PolicyConfig(batch_wait_ms=20))) == {"w1": ["r1"]}


def test_policy_holds_nothing_when_the_cohort_is_full() -> None:
    waiting = line(make.ticket("r1"), make.ticket("r2"), accepted_ms=NOW_MS)

    result = planned(waiting, make.view("w1", free_rows=2), config=PolicyConfig(batch_wait_ms=20))

    assert sent(result) == {"w1": ["r1", "r2"]}


def test_policy_never_holds_a_returned_request() -> None:
    [returned] = [replace(each, is_returned=True) for each in line(make.ticket("r1"), accepted_ms=NOW_MS)]

    assert sent(planned([returned], make.view("w1"), config=PolicyConfig(batch_wait_ms=20))) == {"w1": ["r1"]}
