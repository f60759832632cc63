"""What holds for every plan of the forming policy, by hypothesis. Engine: none; Redis: none."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.former.capacity import Waiting, WorkerState
from broker.former.policy import FormingPlan, PolicyConfig, plan
from broker.wire import Priority
from harness import factories as make

MODELS = ("m1@0", "m2@0")
PRIORITIES: tuple[Priority, ...] = ("interactive", "offline")
NOW_MS = 1_000_000
AGE_MS = 600_000
# No deadline: a machine that is busy with something else is no failure.
OFTEN = settings(max_examples=200, deadline=None)


class World(NamedTuple):
    waiting: list[Waiting]
    workers: list[WorkerState]
    config: PolicyConfig
    key_rows: dict[str, int]


def random_waiting(rng: Random, ordinal: int, accepted_ms: int) -> Waiting:
    is_returned = rng.random() < 0.3
    ticket = make.ticket(
        f"r{ordinal}",
        model=rng.choice(MODELS),
        prompt_tokens=rng.randint(1, 60),
        max_tokens=rng.randint(1, 60),
        priority=rng.choice(PRIORITIES),
        key_id=rng.choice(["", "a", "b"]),
        min_wire=rng.choice([1, 1, 1, 2]),
    )
    return Waiting(ticket, ordinal, accepted_ms, is_returned and rng.randint(0, 1), 0, is_returned)


def random_view(rng: Random, number: int) -> WorkerState:
    rows = rng.randint(1, 6)
    free_rows = rng.randint(0, rows)
    lane = make.lane(
        model=rng.choice(MODELS),
        decode_batch_max=rows,
        max_context_tokens=rng.choice([40, 80, 120]),
        wire=rng.choice([1, 2]),
    )
    return WorkerState(
        f"w{number}",
        lane,
        free_rows,
        rng.choice([None, rng.randint(0, 300)]),
        offline_rows=rng.randint(0, rows - free_rows),
        has_suspect=rng.random() < 0.3,
        unproven_rows=rng.randint(0, rows - free_rows),
    )


def random_world(seed: int, requests: int, workers: int, batch_wait_ms: int) -> World:
    rng = Random(seed)
    ages_ms = sorted((rng.choice([0, 5, 1_000, AGE_MS]) for _ in range(requests)), reverse=True)
    waiting = [random_waiting(rng, ordinal, NOW_MS - age_ms) for ordinal, age_ms in enumerate(ages_ms)]
    rng.shuffle(waiting)
    config = PolicyConfig(batch_wait_ms, rng.randint(0, 3), AGE_MS, rng.choice([0.0, 0.5, 1.0]))
    key_rows = {key_id: rng.randint(0, 3) for key_id in ("a", "b")}
    return World(waiting, [random_view(rng, number) for number in range(workers)], config, key_rows)


def worlds(*, batch_wait_ms: tuple[int, ...] = (0,)) -> st.SearchStrategy[World]:
    """Drawn by seed: drawing every field by itself takes a hundred times as long, and sizes shrink all the same."""
    return st.builds(
        random_world, st.integers(0, 2**32), st.integers(0, 20), st.integers(0, 4), st.sampled_from(batch_wait_ms)
    )


def planned(world: World) -> FormingPlan:
    return plan(world.waiting, world.workers, now_ms=NOW_MS, config=world.config, key_rows=world.key_rows)


def placed(result: FormingPlan) -> list[Waiting]:
    return [each for cohort in result.cohorts for each in cohort.waiting]


def left(world: World, result: FormingPlan) -> list[Waiting]:
    gone = {each.ordinal for each in placed(result)}
    return [each for each in world.waiting if each.ordinal not in gone]


def rows_of_keys(world: World, result: FormingPlan) -> Counter[str]:
    return Counter(world.key_rows) + Counter(each.ticket.key_id for each in placed(result))


def has_row_left(world: World, result: FormingPlan, each: Waiting) -> bool:
    key_id, bound = each.ticket.key_id, world.config.rows_per_key
    return not bound or not key_id or rows_of_keys(world, result)[key_id] < bound


def could_take(worker: WorkerState, taken: tuple[Waiting, ...], each: Waiting) -> bool:
    """Whether a worker could take one more beside those it was given."""
    ticket, lane = each.ticket, worker.lane
    used = sum(other.ticket.cost_tokens for other in taken)
    is_served = (ticket.model, ticket.profile) == (lane.model, lane.profile) and ticket.min_wire <= lane.wire
    is_small = ticket.cost_tokens <= lane.max_context_tokens
    is_small = is_small and (worker.free_tokens is None or used + ticket.cost_tokens <= worker.free_tokens)
    has_suspect = worker.has_suspect or any(other.is_suspect for other in taken)
    is_proven = not worker.unproven_rows and not taken
    may_join = not has_suspect and (is_proven or not each.is_suspect)
    return is_served and is_small and len(taken) < worker.free_rows and may_join


def cohorts_by_worker(result: FormingPlan) -> dict[str, tuple[Waiting, ...]]:
    return {cohort.worker_id: cohort.waiting for cohort in result.cohorts}


@OFTEN
@given(world=worlds(batch_wait_ms=(0, 20)))
def test_plan_neither_doubles_nor_invents_requests(world: World) -> None:
    ordinals = [each.ordinal for each in placed(planned(world))]

    assert len(ordinals) == len(set(ordinals))
    assert set(ordinals) <= {each.ordinal for each in world.waiting}


@OFTEN
@given(world=worlds(batch_wait_ms=(0, 20)))
def test_plan_has_one_cohort_per_worker(world: World) -> None:
    workers = [cohort.worker_id for cohort in planned(world).cohorts]

    assert len(workers) == len(set(workers))


@OFTEN
@given(world=worlds(batch_wait_ms=(0, 20)))
def test_plan_gives_a_worker_only_what_it_can_take(world: World) -> None:
    taken_by_worker = cohorts_by_worker(planned(world))

    for worker in world.workers:
        taken = taken_by_worker.get(worker.id, ())
        for i, each in enumerate(taken):
            assert could_take(worker, taken[:i], each)


@OFTEN
@given(world=worlds(batch_wait_ms=(0, 20)))
def test_plan_keeps_to_the_rows_of_every_key(world: World) -> None:
    result = planned(world)

    for key_id, rows in rows_of_keys(world, result).items():
        if key_id and world.config.rows_per_key:
            assert rows <= max(world.config.rows_per_key, world.key_rows.get(key_id, 0))


@OFTEN
@given(world=worlds())
def test_plan_leaves_no_row_empty_that_something_fits(world: World) -> None:
    result = planned(world)
    taken_by_worker = cohorts_by_worker(result)

    for each in left(world, result):
        if has_row_left(world, result, each):
            able = [worker for worker in world.workers if could_take(worker, taken_by_worker.get(worker.id, ()), each)]
            assert len(able) <= is_held_for_a_suspect(world, result, each)


def is_held_for_a_suspect(world: World, result: FormingPlan, each: Waiting) -> bool:
    """Whether one worker may be kept from a request because a suspect waits for it."""
    return not each.is_suspect and any(
        other.is_suspect and other.pool_key == each.pool_key for other in left(world, result)
    )


def line_of(each: Waiting) -> tuple[object, ...]:
    """Requests alike in all but age: of these, the older must never be passed over."""
    ticket = each.ticket
    return (ticket.model, ticket.key_id, ticket.priority, ticket.min_wire, each.is_suspect, each.is_returned)


@OFTEN
@given(world=worlds())
def test_plan_passes_over_no_older_request_that_is_as_easy_to_place(world: World) -> None:
    result = planned(world)
    gone = placed(result)

    for each in left(world, result):
        younger = [other for other in gone if line_of(other) == line_of(each) and other.ordinal > each.ordinal]
        assert all(other.ticket.cost_tokens < each.ticket.cost_tokens for other in younger)


@OFTEN
@given(world=worlds())
def test_plan_gives_no_fresh_offline_request_a_row_that_an_interactive_one_could_have(world: World) -> None:
    result = planned(world)
    fresh_ms = NOW_MS - AGE_MS
    offline = [
        each for each in placed(result) if each.is_offline and each.accepted_ms > fresh_ms and not each.is_suspect
    ]

    for each in left(world, result):
        if each.is_offline or each.is_suspect:
            continue
        rivals = [other for other in offline if is_as_hard_to_place(other, each)]
        assert not rivals


@OFTEN
@given(world=worlds())
def test_plan_gives_no_interactive_request_a_row_that_an_aged_one_could_have(world: World) -> None:
    world = world._replace(config=PolicyConfig(offline_age_ms=AGE_MS))
    result = planned(world)
    interactive = [each for each in placed(result) if not each.is_offline and not each.is_returned]

    for each in left(world, result):
        if not each.is_offline or each.accepted_ms > NOW_MS - AGE_MS or each.is_suspect:
            continue
        if has_offline_row_left(world):
            assert not [other for other in interactive if is_as_hard_to_place(other, each)]


def has_offline_row_left(world: World) -> bool:
    """Whether no worker's share is the reason that an aged request was left."""
    return all(worker.offline_rows == 0 for worker in world.workers)


def is_as_hard_to_place(placed_one: Waiting, left_one: Waiting) -> bool:
    """Whether the row of one would have done for the other just as well."""
    mine, yours = placed_one.ticket, left_one.ticket
    return (
        (mine.model, mine.key_id) == (yours.model, yours.key_id)
        and mine.cost_tokens >= yours.cost_tokens
        and mine.min_wire >= yours.min_wire
    )


@OFTEN
@given(world=worlds(batch_wait_ms=(20,)))
def test_plan_holds_only_what_has_company_to_wait_for(world: World) -> None:
    result = planned(world)
    at_once = planned(
        world._replace(
            config=PolicyConfig(rows_per_key=world.config.rows_per_key, offline_share=world.config.offline_share)
        )
    )
    held = set(cohorts_by_worker(at_once)) - set(cohorts_by_worker(result))

    assert (result.wake_at_ms is not None) == bool(held)
    assert result.wake_at_ms is None or NOW_MS < result.wake_at_ms <= NOW_MS + 20
    for worker in world.workers:
        if worker.id in held:
            taken = cohorts_by_worker(at_once)[worker.id]
            assert len(taken) < worker.free_rows
            assert min(each.accepted_ms for each in taken) > NOW_MS - 20


@OFTEN
@given(world=worlds())
def test_plan_is_the_same_when_asked_twice(world: World) -> None:
    assert planned(world) == planned(world)


@OFTEN
@given(world=worlds(), data=st.data())
def test_plan_does_not_depend_on_the_order_it_is_told_in(world: World, data: st.DataObject) -> None:
    shuffled = world._replace(
        waiting=data.draw(st.permutations(world.waiting)), workers=data.draw(st.permutations(world.workers))
    )

    assert placed_ids(planned(shuffled)) == placed_ids(planned(world))


def placed_ids(result: FormingPlan) -> dict[str, set[str]]:
    return {cohort.worker_id: set(cohort.request_ids) for cohort in result.cohorts}
