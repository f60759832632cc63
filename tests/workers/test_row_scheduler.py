"""Who has a place in the engine and who gives way. Engine: none; Redis: none."""

from __future__ import annotations

from typing import Any

from broker.wire import Assignment, Request, pack_tokens
from workers.row_scheduler import Moves, SchedulerRules, arrange, count_held
from workers.running_row import ActiveRow
from workers.stop_detection import StopDetector

NOW_S = 1000.0
RULES = SchedulerRules(width=2, offline_age_s=600.0, min_run_s=5.0)


def row(name: str, **changes: Any) -> ActiveRow:
    request = Request(name, "model", "balanced", pack_tokens((1, 2)), 10)
    text = StopDetector(None, stops=(), ending=frozenset())
    made = ActiveRow(Assignment(name, 1), request, prompt=(1, 2), seed=7, reply="", text=text, seated_s=NOW_S)
    for field, value in changes.items():
        setattr(made, field, value)
    return made


def offline(name: str, **changes: Any) -> ActiveRow:
    """An offline row that is decoded."""
    return row(name, is_offline=True, is_submitted=True, **changes)


def interactive(name: str, **changes: Any) -> ActiveRow:
    return row(name, is_submitted=True, **changes)


def moved(*rows: ActiveRow, rules: SchedulerRules = RULES) -> dict[str, list[str]]:
    """What moves, by name."""
    moves = arrange(rows, rules, now_s=NOW_S)
    return {
        what: [each.seat.request_id for each in found]
        for what, found in zip(Moves._fields, moves, strict=True)
        if found
    }


def test_rows_are_admitted_in_order_while_there_is_room() -> None:
    assert moved(row("a"), row("b"), row("c")) == {"admitted": ["a", "b"]}


def test_interactive_rows_are_admitted_before_offline_ones() -> None:
    assert moved(row("o", is_offline=True), row("a"), row("b")) == {"admitted": ["a", "b"]}


def test_interactive_row_takes_the_place_of_the_offline_row_with_the_fewest_tokens() -> None:
    rows = [offline("much", committed=9), offline("little", committed=2), row("a")]

    assert moved(*rows) == {"paused": ["little"], "admitted": ["a"]}


def test_each_interactive_row_takes_one_place_and_no_more_than_there_are() -> None:
    rows = [offline("o"), offline("p"), row("a"), row("b"), row("c")]

    assert moved(*rows) == {"paused": ["o", "p"], "admitted": ["a", "b"]}


def test_offline_row_takes_no_place_from_anybody() -> None:
    assert moved(offline("o"), interactive("a"), row("p", is_offline=True)) == {}


def test_row_that_has_aged_stays() -> None:
    rows = [offline("aged", age_s=600.0), interactive("a"), row("b")]

    assert moved(*rows) == {}


def test_row_ages_while_it_runs() -> None:
    rows = [offline("o", age_s=590.0, seated_s=NOW_S - 10.0), interactive("a"), row("b")]

    assert moved(*rows) == {}


def test_row_that_gave_way_a_moment_ago_is_left_alone() -> None:
    back = offline("back", back_since_s=NOW_S - 4.9)

    assert moved(back, interactive("a"), row("b")) == {}
    assert moved(back, offline("other", committed=9), row("b")) == {"paused": ["other"], "admitted": ["b"]}


def test_row_that_gave_way_long_ago_gives_way_again() -> None:
    rows = [offline("back", back_since_s=NOW_S - 5.0), interactive("a"), row("b")]

    assert moved(*rows) == {"paused": ["back"], "admitted": ["b"]}


def test_paused_row_goes_on_as_soon_as_there_is_room_the_oldest_first() -> None:
    rows = [
        interactive("a"),
        offline("young", is_paused=True, age_s=1.0),
        offline("old", is_paused=True, age_s=9.0),
        row("new", is_offline=True),
    ]

    assert moved(*rows) == {"resumed": ["old"]}


def test_interactive_row_goes_before_a_paused_one() -> None:
    assert moved(interactive("a"), offline("o", is_paused=True), row("b")) == {"admitted": ["b"]}


def test_paused_row_that_has_aged_goes_before_interactive_ones() -> None:
    rows = [interactive("a"), offline("o", is_paused=True, age_s=600.0), row("b")]

    assert moved(*rows) == {"resumed": ["o"]}


def test_row_is_handed_back_when_there_is_no_memory_to_pause_it_in() -> None:
    rows = [offline("o"), offline("paused", is_paused=True), interactive("a"), row("b")]

    assert moved(*rows, rules=SchedulerRules(width=2, paused_tokens=3)) == {"returned": ["o"], "admitted": ["b"]}
    assert moved(*rows, rules=SchedulerRules(width=2, paused_tokens=4)) == {"paused": ["o"], "admitted": ["b"]}


def test_rows_that_have_ended_take_no_place() -> None:
    ended = interactive("ended")
    ended.end("stop")

    assert moved(ended, interactive("a"), offline("o", is_paused=True)) == {"resumed": ["o"]}


def test_held_rows_are_those_that_gave_way_and_have_not_aged() -> None:
    rows = [
        offline("held", back_since_s=NOW_S - 1.0),
        offline("aged", back_since_s=NOW_S - 1.0, age_s=600.0),
        offline("free again", back_since_s=NOW_S - 6.0),
        offline("never"),
    ]

    assert count_held(rows, RULES, now_s=NOW_S) == 1
