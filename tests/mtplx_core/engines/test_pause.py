"""Rows that are paused and resumed, on every engine as in test_engines and on the scripted one. Model: tiny llama."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from mtplx_core.engine import Engine, Row
from mtplx_core.engines.scripted import Script as Played
from mtplx_core.engines.scripted import ScriptedEngine, scripted_completion
from mtplx_core.errors import RowRejectedError
from mtplx_core.models.loader import LoadedModel
from mtplx_core.mtp.engine import MtpBatchEngine, MtpOptions
from mtplx_core.sampling.audit import audit
from tests.mtplx_core.driving import Heard, run
from tests.mtplx_core.engine_cases import GEOMETRY, NEIGHBOURS, ROWS, Build

LONG = Row("long", tuple(range(4, 104)), 24, ignore_eos=True)


def drive(engine: Engine, rows: Sequence[Row], turns: dict[int, Callable[[], None]]) -> Heard:
    """Run `rows` to their ends, doing what `turns` says before the steps of those numbers."""
    return run(engine, rows, before_step=lambda step: turns.get(step, lambda: None)())


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_resumed_row_passes_the_audit_and_so_do_its_neighbours(
    build: Build, loaded: LoadedModel, kind: str, row: Row
) -> None:
    engine = build(kind)
    rows = [row, *NEIGHBOURS] if engine.geometry.decode_batch_max > 1 else [row]
    turns = {3: lambda: engine.pause("row"), 9: lambda: engine.resume("row"), 12: lambda: engine.pause("row")}
    heard = drive(engine, rows, turns)

    engine.resume("row")
    while engine.active_rows:
        heard.take(engine.step())

    assert all(audit(loaded.model, each.prompt, heard.tokens[each.row_id], each.sampling).passed for each in rows)
    assert len(heard.tokens["row"]) == row.max_tokens or not row.ignore_eos


@pytest.mark.parametrize("pause_at", [0, 1, 2, 3, 5])
def test_row_paused_in_prefill_goes_on_with_it(build: Build, loaded: LoadedModel, kind: str, pause_at: int) -> None:
    engine = build(kind)
    turns = {pause_at: lambda: engine.pause("long")}
    heard = drive(engine, [LONG], turns)

    engine.resume("long")
    while engine.active_rows:
        heard.take(engine.step())

    done = [progress.done for progress in heard.prefill]
    assert done == sorted(set(done))
    assert done[-1] == 100
    assert audit(loaded.model, LONG.prompt, heard.tokens["long"], LONG.sampling).passed


def test_paused_row_takes_no_place_and_no_steps(build: Build, kind: str) -> None:
    engine = build(kind)
    most = engine.geometry.decode_batch_max
    for index in range(most):
        engine.admit(replace(ROWS["greedy"], row_id=str(index)))
    engine.pause("0")

    heard = drive(engine, [replace(ROWS["greedy"], row_id="late")], {})

    assert engine.active_rows == 0
    assert engine.snapshot()["paused_rows"] == 1
    assert heard.ends.keys() == {*map(str, range(1, most)), "late"}


def test_row_is_not_resumed_while_all_places_are_taken(build: Build, kind: str) -> None:
    engine = build(kind)
    for index in range(engine.geometry.decode_batch_max):
        engine.admit(replace(ROWS["greedy"], row_id=str(index)))
    engine.pause("0")
    engine.admit(replace(ROWS["greedy"], row_id="late"))

    with pytest.raises(RowRejectedError):
        engine.resume("0")

    assert engine.snapshot()["paused_rows"] == 1


def test_second_row_with_the_id_of_a_paused_one_is_refused(build: Build, kind: str) -> None:
    engine = build(kind)
    engine.admit(ROWS["greedy"])
    engine.pause("row")

    with pytest.raises(RowRejectedError):
        engine.admit(ROWS["greedy"])


@pytest.mark.parametrize("steps", [0, 4])
def test_discarded_paused_row_is_heard_of_no_more(build: Build, kind: str, steps: int) -> None:
    engine = build(kind)
    engine.admit(ROWS["greedy"])
    for _ in range(steps):
        engine.step()
    engine.pause("row")

    engine.discard("row")
    engine.resume("row")

    assert engine.active_rows == 0
    assert engine.snapshot()["paused_rows"] == 0
    assert not engine.step().tokens


def test_pausing_and_resuming_unknown_rows_does_nothing(build: Build, kind: str) -> None:
    engine = build(kind)
    engine.pause("nobody")
    engine.resume("nobody")

    assert engine.active_rows == 0


@pytest.mark.parametrize("wait_steps", [0, 1, 3])
def test_tokens_under_way_may_end_a_paused_row(build: Build, loaded: LoadedModel, kind: str, wait_steps: int) -> None:
    """At whatever step a row is paused, it ends once and has all its tokens, also when it is resumed at once."""
    for pause_at in range(1, 8):
        engine = build(kind)
        heard = Heard()
        engine.admit(replace(ROWS["greedy"], max_tokens=3))
        for _ in range(pause_at):
            heard.take(engine.step())
        engine.pause("row")
        for _ in range(wait_steps):
            heard.take(engine.step())
        engine.resume("row")
        while engine.active_rows:
            heard.take(engine.step())

        assert heard.ends["row"].reason == "length"
        assert len(heard.tokens["row"]) == 3


@pytest.mark.parametrize(("kind", "fed"), [("ar_batch", 1), ("mtp_batch", 1), ("b1_exact", 0), ("mtp_batch", 0)])
def test_rows_that_somebody_waits_for_are_fed_before_offline_ones(build: Build, kind: str, fed: int) -> None:
    engine = build(kind)
    engine.admit(replace(LONG, row_id="offline", is_offline=True))
    for _ in range(fed):
        engine.step()
    engine.admit(replace(LONG, row_id="waited for", prompt=LONG.prompt[::-1]))

    heard = drive(engine, [], {})

    fed_whole = [progress.row_id for progress in heard.prefill if progress.done == progress.total]
    assert fed_whole == ["waited for", "offline"]


@pytest.mark.parametrize(
    ("is_offline", "tokens", "fed_at_once"), [(True, 20, 3), (False, 20, 1), (False, 10, 3), (False, 60, 1)]
)
def test_short_prompts_are_fed_together_and_more_of_them_while_nobody_waits_for_the_next_token(
    loaded: LoadedModel, is_offline: bool, tokens: int, fed_at_once: int
) -> None:
    geometry = replace(GEOMETRY, prefill_chunk_tokens=64)
    engine = MtpBatchEngine(loaded, geometry, options=MtpOptions(chunk_tokens=32))
    engine.admit(replace(ROWS["greedy"], is_offline=is_offline))
    for _ in range(3):
        engine.step()
    for name in "abc":
        engine.admit(replace(LONG, row_id=name, prompt=LONG.prompt[:tokens], is_offline=True))

    result = engine.step()

    assert [progress.row_id for progress in result.prefill] == list("abc")[:fed_at_once]


def test_scripted_row_goes_on_where_it_was_paused() -> None:
    engine, script = ScriptedEngine(GEOMETRY), Played()
    turns = {4: lambda: engine.pause("row"), 8: lambda: engine.resume("row")}

    heard = drive(engine, [ROWS["greedy"], NEIGHBOURS[0]], turns)

    assert tuple(heard.tokens["row"]) == scripted_completion(ROWS["greedy"], script)
    assert engine.snapshot()["paused_rows"] == 0
