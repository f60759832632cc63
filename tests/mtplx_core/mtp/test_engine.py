"""What the MTP lane promises beyond every engine's contract. Runs on a tiny random llama with a random head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from harness.depths import Scheduled
from harness.knowing_head import KnowingHead
from harness.models import tiny_llama
from mtplx_core.engine import Geometry, Row, SamplingParams
from mtplx_core.engines.serial import SerialEngine
from mtplx_core.errors import EngineDeadError
from mtplx_core.heads.attached import AttachedHead
from mtplx_core.heads.base import Head
from mtplx_core.models.loader import LoadedModel
from mtplx_core.mtp.depth import AcceptanceRates, Drafting, FixedDepth
from mtplx_core.mtp.device_batch import CyclePlan, DeviceBatch, Started
from mtplx_core.mtp.engine import MtpBatchEngine, MtpOptions
from mtplx_core.sampling.audit import audit, compare
from tests.mtplx_core.driving import assert_decided, run
from tests.mtplx_core.mtp.conftest import random_head

GEOMETRY = Geometry(decode_batch_max=4, max_context_tokens=200, depth=7, prefill_chunk_tokens=16)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=77)
LOOPING = tuple(range(40, 48)) * 3
MIXED = (0, 2, 0, 0, 7, 1)
POISON = 200


class Order:
    """Whether the engines of this file build a cycle while another runs, as on a GPU, or in turn, as on a CPU."""

    overlaps = True


@pytest.fixture(autouse=True, params=[True, False], ids=["overlapped", "in-turn"])
def _order(request: pytest.FixtureRequest) -> None:
    Order.overlaps = request.param


def engine_of(
    loaded: LoadedModel,
    *depths: int,
    head: Head | None = None,
    keeps_width: bool = False,
    geometry: Geometry = GEOMETRY,
) -> MtpBatchEngine:
    policy = Scheduled(*depths) if len(depths) > 1 else FixedDepth(depths[0])
    options = MtpOptions(policy=policy, keeps_width=keeps_width, overlaps=Order.overlaps)
    return MtpBatchEngine(loaded, geometry, head=head, options=options)


def rows_of(*, sampling: SamplingParams) -> list[Row]:
    prompts = [(5,), LOOPING, tuple(range(100, 171)), (9, 8)]
    return [
        Row(f"r{index}", prompt, 24 + 4 * index, replace(sampling, seed=index), ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    ("sampling", "depths"),
    [*((SAMPLED, depths) for depths in [(0,), (1,), (7,), MIXED, (0,) * 20 + (2,)]), (SamplingParams(), MIXED)],
    ids=lambda value: str(value) if isinstance(value, tuple) else "greedy" if value.is_greedy else "sampled",
)
@pytest.mark.parametrize("has_head", [False, True], ids=["lookup", "head"])
def test_engine_passes_the_audit_at_every_depth_schedule(
    loaded: LoadedModel, head: AttachedHead, depths: tuple[int, ...], sampling: SamplingParams, has_head: bool
) -> None:
    engine = engine_of(loaded, *depths, head=head if has_head else None)

    heard = run(engine, rows_of(sampling=sampling))

    for row in rows_of(sampling=sampling):
        result = audit(loaded.model, row.prompt, heard.tokens[row.row_id], row.sampling)
        assert result.passed, (row.row_id, result)
        assert len(heard.tokens[row.row_id]) == row.max_tokens


def test_a_head_that_knows_the_answer_is_accepted_every_time(loaded: LoadedModel) -> None:
    """The head's bookkeeping is right iff a head that could be right is: this one repeats what serial said."""
    rows = rows_of(sampling=SamplingParams())
    answers = run(SerialEngine(loaded, GEOMETRY), rows)
    for row in rows:
        assert_decided(loaded, row, answers.tokens[row.row_id])
    knowing = KnowingHead(loaded, [(row.prompt, answers.tokens[row.row_id]) for row in rows])

    engine = engine_of(loaded, 0, 0, 2, 3, 1, head=knowing)
    heard = run(engine, rows)

    for row in rows:
        assert heard.tokens[row.row_id] == answers.tokens[row.row_id]
    drafted = engine.snapshot()["drafters"]["head"]
    assert drafted["tried"] == drafted["right"] > 10
    assert heard.ends["r1"].stats.cycles < len(heard.tokens["r1"])


@pytest.mark.parametrize("longest", range(1, 6))
def test_drafts_behind_the_token_that_ends_a_row_are_not_counted_as_accepted(loaded: LoadedModel, longest: int) -> None:
    row = rows_of(sampling=SamplingParams())[1]
    answer = run(SerialEngine(loaded, GEOMETRY), [row]).tokens[row.row_id]
    assert_decided(loaded, row, answer)
    engine = engine_of(loaded, 3, head=KnowingHead(loaded, [(row.prompt, answer)]))

    heard = run(engine, [replace(row, max_tokens=longest)])

    stats = heard.ends[row.row_id].stats
    assert heard.tokens[row.row_id] == answer[:longest]
    assert sum(stats.accepted) <= longest
    assert sum(stats.accepted) >= longest - stats.cycles


def test_row_of_which_nothing_was_drafted_counts_no_drafts(loaded: LoadedModel) -> None:
    row = Row("row", (5, 6, 7), 12, ignore_eos=True)

    heard = run(engine_of(loaded, 7), [row])

    text = [*row.prompt, *heard.tokens["row"]]
    assert len(set(pairwise(text))) == len(text) - 1, "it repeats itself, so lookup finds something"
    assert sum(heard.ends["row"].stats.drafted) == 0


def test_row_that_takes_a_poisoned_rows_slot_is_unharmed() -> None:
    loaded = tiny_llama(poison_token_id=POISON)
    engine = engine_of(loaded, 2, head=random_head(loaded), keeps_width=True)
    successor = Row("good", (10, 20, 30), 20, ignore_eos=True)

    def succeed(step: int) -> None:
        if step == 6:
            engine.admit(successor)

    heard = run(engine, [Row("bad", (10, POISON, 30), 20), Row("other", (4,), 40)], before_step=succeed)

    assert heard.ends["bad"].reason == "error"
    assert heard.ends["good"].reason == "length"
    assert heard.ends["good"].stats.max_width == 2
    assert audit(loaded.model, successor.prompt, heard.tokens["good"], successor.sampling).passed


def test_neighbour_of_a_poisoned_row_gets_its_own_answer() -> None:
    loaded = tiny_llama(poison_token_id=POISON)
    good = Row("good", (10, 20, 30), 30, SAMPLED, ignore_eos=True)

    heard = run(engine_of(loaded, 2), [Row("bad", (POISON, 4), 20), good])

    assert heard.ends["bad"].reason == "error"
    assert not heard.tokens["bad"]
    assert audit(loaded.model, good.prompt, heard.tokens["good"], good.sampling).passed


def test_stop_token_inside_a_multi_token_step_ends_the_row_there(loaded: LoadedModel) -> None:
    row = Row("row", LOOPING, 60, ignore_eos=True)
    answer = run(engine_of(loaded, 3), [row]).tokens["row"]
    stop = next(token for place, token in enumerate(answer) if place > 8 and token not in answer[:place])

    heard = run(engine_of(loaded, 3), [replace(row, stop_token_ids=frozenset({stop}))])

    assert heard.tokens["row"] == answer[: answer.index(stop) + 1]
    assert heard.ends["row"].reason == "stop"


def test_resumed_row_goes_on_where_another_worker_stopped(loaded: LoadedModel, head: AttachedHead) -> None:
    row = Row("row", LOOPING, 50, replace(SAMPLED, frequency_penalty=0.4), ignore_eos=True)
    whole = run(engine_of(loaded, 2, head=head), [row]).tokens["row"]

    rest = run(engine_of(loaded, 0, 3, 1), [replace(row, committed=tuple(whole[:23]))])

    assert rest.starts["row"] == 23
    assert compare(loaded.model, row.prompt, whole, [*whole[:23], *rest.tokens["row"]], row.sampling).passed


def test_paused_row_is_counted_in_the_memory_that_caches_take(loaded: LoadedModel, head: AttachedHead) -> None:
    engine = engine_of(loaded, 2, head=head)
    engine.admit(rows_of(sampling=SAMPLED)[2])
    for _ in range(8):
        engine.step()
    engine.pause("r2")
    while engine.active_rows:
        engine.step()

    counted = engine.snapshot()["kv_bytes"]

    assert 0 < counted <= engine.row_bytes(71 + 32)


def test_engine_frees_its_caches_when_the_last_row_has_left(loaded: LoadedModel, head: AttachedHead) -> None:
    engine = engine_of(loaded, 1, head=head)

    run(engine, rows_of(sampling=SamplingParams()))

    assert engine.snapshot()["kv_bytes"] == 0
    assert engine.snapshot()["physical_rows"] == 0


def test_engine_frees_its_caches_when_its_only_row_is_discarded(loaded: LoadedModel, head: AttachedHead) -> None:
    engine = engine_of(loaded, 1, head=head)
    engine.admit(Row("row", (5, 6, 7), 30, ignore_eos=True))
    for _ in range(4):
        engine.step()
    assert engine.snapshot()["kv_bytes"] > 0

    engine.discard("row")

    assert engine.snapshot()["kv_bytes"] == 0


def test_row_bytes_are_at_least_what_a_row_takes(loaded: LoadedModel, head: AttachedHead) -> None:
    engine = engine_of(loaded, 3, head=head)
    row = Row("row", tuple(range(100)), 40, ignore_eos=True)
    engine.admit(row)
    most = 0
    while engine.active_rows:
        engine.step()
        most = max(most, engine.snapshot()["kv_bytes"])

    assert 0 < most <= engine.row_bytes(140)


def test_step_that_raises_leaves_an_engine_that_says_it_is_dead(loaded: LoadedModel) -> None:
    class Broken(Scheduled):
        def choose(
            self,
            rows: Sequence[AcceptanceRates],
            found: Sequence[bool] | None = None,
            *,
            width: int = 0,
            keys: int | None = None,
            is_first: bool = False,
        ) -> Drafting:
            raise RuntimeError("no such device")

    engine = MtpBatchEngine(loaded, GEOMETRY, options=MtpOptions(policy=Broken(0)))
    engine.admit(Row("row", (1, 2), 5))

    with pytest.raises(EngineDeadError, match="no such device"):
        engine.step()
    with pytest.raises(EngineDeadError, match="earlier step"):
        engine.step()


def test_snapshot_counts_drafts_by_place_and_drafter(loaded: LoadedModel, head: AttachedHead) -> None:
    engine = engine_of(loaded, 2, head=head)

    heard = run(engine, rows_of(sampling=SamplingParams()))

    shown = engine.snapshot()
    assert shown["tokens"] == sum(map(len, heard.tokens.values()))
    assert shown["left"] == {"length": 4}
    assert shown["drafted_by_place"][0] == sum(end.stats.drafted[0] for end in heard.ends.values())
    assert shown["accepted_by_place"][0] == sum(end.stats.accepted[0] for end in heard.ends.values())
    tried = shown["drafters"]["head"]["tried"] + shown["drafters"]["lookup"]["tried"]
    assert tried == shown["drafted_by_place"][0]
    assert shown["lane"] == "mtp_batch_width_4"


@pytest.mark.parametrize("trusts_lookup", [True, False])
def test_row_that_is_not_to_draft_by_lookup_drafts_from_the_head(
    loaded: LoadedModel, head: AttachedHead, monkeypatch: pytest.MonkeyPatch, trusts_lookup: bool
) -> None:
    class Decided(Scheduled):
        def choose(
            self,
            rows: Sequence[AcceptanceRates],
            found: Sequence[bool] | None = None,
            *,
            width: int = 0,
            keys: int | None = None,
            is_first: bool = False,
        ) -> Drafting:
            known = found if found is not None else [True] * len(rows)
            return Drafting(1, 1, tuple(has and trusts_lookup for has in known))

    drafts: list[Any] = []
    start = DeviceBatch.start

    def noting(self: DeviceBatch, plan: CyclePlan) -> Started:
        started = start(self, plan)
        drafts.append(started.drafts.tolist())
        return started

    monkeypatch.setattr(DeviceBatch, "start", noting)
    options = MtpOptions(policy=Decided(1), overlaps=Order.overlaps)
    engine = MtpBatchEngine(loaded, GEOMETRY, head=head, options=options)

    run(engine, [Row("row", (40, 41, 42, 43, 44) * 3, 20, ignore_eos=True)])

    tried = engine.snapshot()["drafters"]
    assert (drafts[0] == [[40]]) == trusts_lookup
    assert ("lookup" in tried) == trusts_lookup
    assert trusts_lookup or tried["head"]["tried"] == engine.snapshot()["drafted_by_place"][0]


def test_step_in_turn_tells_the_tokens_of_its_own_cycle(
    loaded: LoadedModel, head: AttachedHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    start = DeviceBatch.start

    def counting(self: DeviceBatch, plan: CyclePlan) -> Started:
        started.append(plan.depth)
        return start(self, plan)

    monkeypatch.setattr(DeviceBatch, "start", counting)
    engine = engine_of(loaded, 0, 2, 1, head=head)
    engine.admit(Row("row", tuple(range(40)), 12, ignore_eos=True))
    told: list[bool] = []
    cycles: list[int] = []

    while engine.active_rows:
        started.clear()
        told.append(bool(engine.step().tokens))
        cycles.append(len(started))

    own = [bool(count) for count in cycles]
    # Overlapped, the cycle started last is still under way, and the last step only reads.
    assert told == ([False, *own[:-1]] if Order.overlaps else own)


@pytest.mark.parametrize("pause_s", [0.0, 0.5])
def test_cycles_in_turn_are_timed_from_building_to_reading_whatever_comes_between_steps(
    loaded: LoadedModel, pause_s: float
) -> None:
    class Noting(Scheduled):
        now_s = 0.0
        costs: list[float] = []

        def choose(
            self,
            rows: Sequence[AcceptanceRates],
            found: Sequence[bool] | None = None,
            *,
            width: int = 0,
            keys: int | None = None,
            is_first: bool = False,
        ) -> Drafting:
            self.now_s += 1.0  # as long as it takes to build a cycle; nobody waits for it to end
            return super().choose(rows, found)

        def see_cost(self, rows: int, depth: int, cost: float, *, head_depth: int, keys: int | None = None) -> None:
            self.costs.append(cost)

        def pause(self, step: int) -> None:
            self.now_s += pause_s

    policy = Noting(1)
    policy.costs = []
    options = MtpOptions(policy=policy, overlaps=Order.overlaps, clock=lambda: policy.now_s)
    engine = MtpBatchEngine(loaded, GEOMETRY, options=options)

    run(engine, [Row("row", (5, 6, 7), 30, ignore_eos=True)], before_step=policy.pause)

    assert set(policy.costs) == (set() if Order.overlaps else {1.0})
