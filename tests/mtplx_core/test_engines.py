"""What every engine promises, on every engine: serial, ar_batch, b1-exact, mtp_batch. Model: tiny random llama."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from mtplx_core.audit import audit, compare
from mtplx_core.build import build_engine
from mtplx_core.engine import Engine, Geometry, Profile, Row, Sampling, SchedulerMode, StepResult
from mtplx_core.errors import EngineDeadError, RowRejectedError
from mtplx_core.loader import LoadedModel
from tests.mtplx_core.driving import run
from tests.support.models import VOCAB_SIZE, tiny_llama

GEOMETRY = Geometry(decode_batch_max=6, max_context_tokens=256, depth=2, prefill_chunk_tokens=16)
KINDS: dict[str, tuple[SchedulerMode, Profile]] = {
    "serial": (SchedulerMode.SERIAL, Profile.BALANCED),
    "ar_batch": (SchedulerMode.AR_BATCH, Profile.BALANCED),
    "b1_exact": (SchedulerMode.AR_BATCH, Profile.B1_EXACT),
    "mtp_batch": (SchedulerMode.MTP_BATCH, Profile.BALANCED),
}
POISON = 200
BATCHED = [name for name in KINDS if name != "serial"]

SAMPLED = Sampling(temperature=0.9, top_p=0.9, seed=77)
NEIGHBOURS = [
    Row("n0", tuple(range(40, 45)), 30),
    Row("n1", tuple(range(90, 160)), 50, Sampling(temperature=1.35, top_p=0.55, top_k=7, seed=7)),
    Row("n2", (5,), 12, Sampling(frequency_penalty=1.5, repetition_penalty=1.3)),
    Row("n3", tuple(range(10, 60)), 40, Sampling(temperature=2.0, seed=1, logit_bias=((9, 5.0),))),
]
ROWS = {
    "greedy": Row("row", (10, 20, 30), 24, ignore_eos=True),
    "sampled": Row("row", (10, 20, 30), 24, SAMPLED, ignore_eos=True),
    "long prompt": Row("row", tuple(range(4, 104)), 24, SAMPLED, ignore_eos=True),
    "penalties": Row("row", (10, 20, 30), 24, Sampling(0.7, 1.0, 0, 0.02, 1.2, 0.3, 0.4, ((9, 1.0),), 2**63 + 5)),
}
ROW_CASES = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())

Build = Callable[..., Engine]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_llama()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def build(loaded: LoadedModel) -> Iterator[Build]:
    made: list[Engine] = []

    def make(kind: str, *, model: LoadedModel | None = None, geometry: Geometry = GEOMETRY) -> Engine:
        mode, profile = KINDS[kind]
        made.append(build_engine(mode, model or loaded, geometry=geometry, profile=profile))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
        assert engine.active_rows == 0


@ROW_CASES
def test_engine_takes_the_samplers_token_at_every_position(
    build: Build, loaded: LoadedModel, kind: str, row: Row
) -> None:
    output = run(build(kind), [row]).tokens["row"]

    result = audit(loaded.model, row.prompt, output, row.sampling)

    assert result.passed, result
    assert result.positions > 0


@ROW_CASES
@pytest.mark.parametrize("kind", BATCHED)
def test_row_gets_the_serial_answer_among_neighbours(build: Build, loaded: LoadedModel, kind: str, row: Row) -> None:
    alone = run(build("serial"), [row]).tokens["row"]

    heard = run(build(kind), [*NEIGHBOURS[:2], row, *NEIGHBOURS[2:]])

    assert compare(loaded.model, row.prompt, alone, heard.tokens["row"], row.sampling).passed
    assert len(heard.ends) == 5


@pytest.mark.parametrize("kind", BATCHED)
def test_all_neighbours_pass_the_audit_while_rows_join_and_leave(build: Build, loaded: LoadedModel, kind: str) -> None:
    engine = build(kind)
    late = {4: NEIGHBOURS[1], 7: NEIGHBOURS[2], 19: NEIGHBOURS[3]}

    def join(step: int) -> None:
        if step in late:
            engine.admit(late[step])

    heard = run(engine, [ROWS["sampled"], NEIGHBOURS[0]], before_step=join)

    assert heard.ends.keys() == {"row", "n0", "n1", "n2", "n3"}
    for row in [ROWS["sampled"], *NEIGHBOURS]:
        result = audit(loaded.model, row.prompt, heard.tokens[row.row_id], row.sampling)
        assert result.passed, (row.row_id, result)


@pytest.mark.parametrize("cut", [1, 11, 23])
def test_resumed_row_goes_on_as_if_nothing_had_happened(build: Build, loaded: LoadedModel, kind: str, cut: int) -> None:
    row = ROWS["penalties"]
    whole = run(build(kind), [row]).tokens["row"]

    heard = run(build(kind), [replace(row, committed=tuple(whole[:cut]))])

    resumed = whole[:cut] + heard.tokens["row"]
    assert heard.starts["row"] == cut
    assert audit(loaded.model, row.prompt, resumed, row.sampling).passed
    assert compare(loaded.model, row.prompt, whole, resumed, row.sampling).passed


def test_row_that_had_committed_everything_ends_without_a_token(build: Build, kind: str) -> None:
    heard = run(build(kind), [Row("row", (1, 5), 3, committed=(7, 8, 9))])

    assert heard.ends["row"].reason == "length"
    assert not heard.tokens["row"]


def test_row_that_had_committed_its_stop_ends_without_a_token(build: Build, kind: str) -> None:
    heard = run(build(kind), [Row("row", (1, 5), 30, committed=(7, 8), stop_token_ids=frozenset({8}))])

    assert heard.ends["row"].reason == "stop"
    assert not heard.tokens["row"]


def test_row_ends_with_length_at_max_tokens(build: Build, kind: str) -> None:
    heard = run(build(kind), [Row("row", (10, 20, 30), 5, ignore_eos=True)])

    assert len(heard.tokens["row"]) == 5
    assert heard.ends["row"].reason == "length"


def test_row_ends_at_a_stop_token_and_hands_it_out(build: Build, kind: str) -> None:
    row = ROWS["greedy"]
    whole = run(build(kind), [row]).tokens["row"]
    stop = whole[6]

    heard = run(build(kind), [replace(row, stop_token_ids=frozenset({stop}))])

    assert heard.tokens["row"] == whole[: whole.index(stop) + 1]
    assert heard.ends["row"].reason == "stop"


def test_row_ends_at_end_of_sequence_unless_told_to_ignore_it(build: Build, kind: str) -> None:
    row = ROWS["greedy"]
    whole = run(build(kind), [row]).tokens["row"]
    model = tiny_llama(eos_token_ids=frozenset({whole[3]}))

    ended = run(build(kind, model=model), [replace(row, ignore_eos=False)])
    ignored = run(build(kind, model=model), [row])

    assert ended.tokens["row"] == whole[: whole.index(whole[3]) + 1]
    assert ended.ends["row"].reason == "stop"
    assert len(ignored.tokens["row"]) == 24


def test_logprobs_are_those_of_the_raw_logits(build: Build, kind: str) -> None:
    row = replace(ROWS["penalties"], top_logprobs=3)

    heard = run(build(kind), [row])

    logprobs = heard.logprobs["row"]
    assert len(logprobs) == len(heard.tokens["row"])
    assert all(len(entry.top) == 3 for entry in logprobs)
    assert all(a >= b for entry in logprobs for (_, a), (_, b) in zip(entry.top, entry.top[1:], strict=False))
    assert all(entry.logprob <= entry.top[0][1] <= 0 for entry in logprobs)


@pytest.mark.parametrize("kind", BATCHED)
def test_each_row_gets_as_many_logprobs_as_it_asked_for(build: Build, kind: str) -> None:
    rows = [replace(NEIGHBOURS[0], top_logprobs=0), replace(NEIGHBOURS[1], top_logprobs=5), NEIGHBOURS[2]]

    heard = run(build(kind), rows)

    assert {len(entry.top) for entry in heard.logprobs["n0"]} == {0}
    assert {len(entry.top) for entry in heard.logprobs["n1"]} == {5}
    assert not heard.logprobs["n2"]


def test_prefill_is_reported_chunk_by_chunk(build: Build, kind: str) -> None:
    heard = run(build(kind), [Row("row", tuple(range(4, 54)), 2)])

    done = [progress.done for progress in heard.prefill]
    assert len(done) >= 3
    assert done == sorted(set(done))
    assert done[-1] == heard.prefill[-1].total


@pytest.mark.parametrize("kind", BATCHED)
def test_running_row_keeps_moving_while_a_long_prompt_is_fed(build: Build, kind: str) -> None:
    engine = build(kind)
    engine.admit(replace(ROWS["greedy"], max_tokens=100))
    while not engine.step().tokens:
        pass
    engine.admit(Row("long", tuple(range(4, 204)), 4))

    moved = fed = 0
    for _ in range(8):
        result = engine.step()
        fed += bool(result.prefill)
        moved += any(part.row_id == "row" for part in result.tokens)

    assert fed == 8
    assert moved >= 7


def test_discarded_row_is_heard_of_no_more(build: Build, kind: str) -> None:
    engine = build(kind)

    def leave(step: int) -> None:
        if step == 6:
            engine.discard("row")
            assert engine.active_rows == 0

    heard = run(engine, [replace(ROWS["greedy"], max_tokens=60)], before_step=leave)

    assert not heard.ends
    assert heard.steps == 6


@pytest.mark.parametrize("after_steps", range(6))
@pytest.mark.parametrize("kind", BATCHED)
def test_neighbours_of_a_discarded_row_keep_their_answers(
    build: Build, loaded: LoadedModel, kind: str, after_steps: int
) -> None:
    engine = build(kind)

    def leave(step: int) -> None:
        if step == after_steps:
            engine.discard("n1")

    heard = run(engine, [NEIGHBOURS[1], ROWS["sampled"], NEIGHBOURS[0]], before_step=leave)

    assert heard.ends.keys() == {"row", "n0"}
    for row in (ROWS["sampled"], NEIGHBOURS[0]):
        assert audit(loaded.model, row.prompt, heard.tokens[row.row_id], row.sampling).passed


def test_row_id_may_be_used_again_after_a_discard(build: Build, loaded: LoadedModel, kind: str) -> None:
    engine = build(kind)
    engine.admit(NEIGHBOURS[3])
    for _ in range(4):
        engine.step()
    engine.discard("n3")

    heard = run(engine, [replace(ROWS["sampled"], row_id="n3")])

    assert audit(loaded.model, ROWS["sampled"].prompt, heard.tokens["n3"], SAMPLED).passed


def test_discarding_an_unknown_row_does_nothing(build: Build, kind: str) -> None:
    build(kind).discard("nobody")


def test_step_returns_at_once_when_nothing_is_active(build: Build, kind: str) -> None:
    result = build(kind).step()

    assert result == StepResult()


BAD_ROWS = {
    "empty prompt": Row("bad", (), 5),
    "too long": Row("bad", (1,) * 250, 7),
    "token outside the vocabulary": Row("bad", (VOCAB_SIZE,), 5),
    "negative token": Row("bad", (-1,), 5),
    "committed outside the vocabulary": Row("bad", (1,), 5, committed=(VOCAB_SIZE,)),
    "bias outside the vocabulary": Row("bad", (1,), 5, Sampling(logit_bias=((VOCAB_SIZE, 1.0),))),
    "no tokens wanted": Row("bad", (1,), 0),
    "more committed than wanted": Row("bad", (1,), 1, committed=(1, 2)),
}


@pytest.mark.parametrize("row", BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_row_that_breaks_a_bound_is_refused_and_nothing_is_kept(build: Build, kind: str, row: Row) -> None:
    engine = build(kind)

    with pytest.raises(RowRejectedError):
        engine.admit(row)

    assert engine.active_rows == 0


def test_row_that_just_fits_is_taken(build: Build, kind: str) -> None:
    heard = run(build(kind), [Row("row", (1,) * 250, 6, ignore_eos=True)])

    assert len(heard.tokens["row"]) == 6


def test_second_row_of_the_same_id_is_refused(build: Build, kind: str) -> None:
    engine = build(kind)
    engine.admit(ROWS["greedy"])

    with pytest.raises(RowRejectedError):
        engine.admit(ROWS["greedy"])


def test_more_rows_than_the_geometry_holds_are_refused(build: Build, kind: str) -> None:
    engine = build(kind)
    for index in range(engine.geometry.decode_batch_max):
        engine.admit(replace(ROWS["greedy"], row_id=str(index)))

    with pytest.raises(RowRejectedError):
        engine.admit(replace(ROWS["greedy"], row_id="one too many"))


def test_full_engine_takes_a_row_again_once_one_has_ended(build: Build, kind: str) -> None:
    engine = build(kind)
    count = engine.geometry.decode_batch_max
    run(engine, [replace(ROWS["greedy"], row_id=str(index), max_tokens=2) for index in range(count)])

    assert run(engine, [ROWS["greedy"]]).ends["row"].reason == "length"


def test_row_bytes_grow_no_smaller_with_length(build: Build, kind: str) -> None:
    engine = build(kind)

    assert 0 < engine.row_bytes(10) <= engine.row_bytes(256)


def test_snapshot_names_the_mode_and_counts_rows(build: Build, kind: str) -> None:
    engine = build(kind)
    engine.admit(ROWS["greedy"])

    snapshot = engine.snapshot()

    assert snapshot["active_rows"] == 1
    assert snapshot["mode"] in {"serial", "ar_batch", "mtp_batch"}


def test_row_with_numbers_that_are_not_finite_ends_alone(build: Build, kind: str) -> None:
    model = tiny_llama(poison_token_id=POISON)
    good = [] if kind == "serial" else [ROWS["sampled"], NEIGHBOURS[0]]

    heard = run(build(kind, model=model), [*good[:1], Row("bad", (4, POISON, 6), 9), *good[1:]])

    assert heard.ends["bad"].reason == "error"
    assert "not finite" in heard.ends["bad"].message
    assert not heard.tokens["bad"]
    for row in good:
        assert audit(model.model, row.prompt, heard.tokens[row.row_id], row.sampling).passed


def test_engine_takes_good_rows_after_a_bad_one(build: Build, kind: str) -> None:
    model = tiny_llama(poison_token_id=POISON)
    engine = build(kind, model=model)
    run(engine, [Row("bad", (4, POISON, 6), 9)])

    heard = run(engine, [ROWS["sampled"]])

    assert audit(model.model, ROWS["sampled"].prompt, heard.tokens["row"], SAMPLED).passed


def test_engine_that_died_says_so_again(build: Build, kind: str) -> None:
    model = tiny_llama()
    tripwire = Tripwire.under(model)
    engine = build(kind, model=model)
    engine.admit(ROWS["greedy"])
    while not engine.step().tokens:
        pass

    tripwire.is_armed = True
    with pytest.raises(EngineDeadError, match="tripped"):
        run(engine, [])
    tripwire.is_armed = False
    with pytest.raises(EngineDeadError):
        engine.step()


class Tripwire:
    """A layer that fails on demand."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.is_armed = False

    @classmethod
    def under(cls, loaded: LoadedModel) -> Tripwire:
        model: Any = loaded.model
        tripwire = cls(model.model.layers[0])
        model.model.layers[0] = tripwire
        return tripwire

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_armed:
            raise RuntimeError("tripped")
        return self._layer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)
