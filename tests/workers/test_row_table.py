"""What steps, commits and refusals change about rows. Engine: none; Redis: none."""

from __future__ import annotations

from typing import Any

import pytest

from broker.scripts import CommitResult, FinishResult, Refusal
from broker.wire import (
    Assignment,
    Cause,
    Failed,
    Finished,
    Logprob,
    Progress,
    Request,
    Sampling,
    Stats,
    Tokens,
    decode_events,
)
from broker.wire import pack_tokens as pack
from mtplx_core.engine import (
    PrefillProgress,
    RowCycle,
    RowEnd,
    RowStats,
    RowTokens,
    SamplingParams,
    StepResult,
    TokenLogprob,
)
from workers.row_table import PROGRESS_EVERY_S, RowTable
from workers.running_row import ActiveRow, end_of
from workers.stop_detection import StopDetector

TABLE = tuple(bytes([token]) for token in range(128))
STATS = RowStats(cycles=3, drafted=(3,), accepted=(2,), min_width=1, max_width=4)


def row(name: str = "a", *, reply: str = "ear", stops: tuple[bytes, ...] = (), **request: Any) -> ActiveRow:
    made = Request(name, "model", "balanced", pack((1, 2)), 10, stop=stops, **request)
    text = StopDetector(TABLE, stops=stops, ending=frozenset({0}))
    return ActiveRow(Assignment(name, 1), made, prompt=(1, 2), seed=7, reply=reply, text=text)


def table_of(*rows: ActiveRow) -> RowTable:
    table = RowTable()
    for each in rows:
        each.is_submitted = True
        table.add(each)
    return table


def brought(name: str, position: int, *tokens: int) -> StepResult:
    return StepResult(tokens=(RowTokens(f"{name}:1", position, tokens),))


def ended(name: str, reason: Any, message: str = "") -> StepResult:
    return StepResult(ends=(RowEnd(f"{name}:1", reason, message, STATS),))


def commit_all(table: RowTable, result: CommitResult | None = None) -> list[ActiveRow]:
    return table.take_commit(table.gather(0.0), result or CommitResult())


def test_drafts_behind_a_stop_string_are_not_counted_as_accepted() -> None:
    stopped = row(stops=(b"b",))

    stopped.take(RowTokens("a:1", 0, (97, 98, 99, 100), cycle=RowCycle(2, drafted=5, accepted=3)))

    assert stopped.stats.drafted == (1,) * 5
    assert stopped.stats.accepted == (1, 1, 0, 0, 0)


def test_row_asks_the_engine_for_what_the_request_says() -> None:
    sampling = Sampling(0.5, 0.9, 40, 0.1, 1.1, 0.2, 0.3, ((5, 1.5),))
    made = row(sampling=sampling, stop_token_ids=(9,), ignore_eos=True, top_logprobs=2, min_tokens=3)
    made.resume(pack((65, 66)), [])

    asked = made.engine_row()

    assert (asked.row_id, asked.prompt, asked.committed, asked.max_tokens) == ("a:1", (1, 2), (65, 66), 10)
    assert asked.sampling == SamplingParams(0.5, 0.9, 40, 0.1, 1.1, 0.2, 0.3, ((5, 1.5),), 7)
    assert (asked.stop_token_ids, asked.ignore_eos, asked.top_logprobs) == (frozenset({9}), True, 2)
    assert asked.min_tokens == 3


def test_row_ends_at_once_when_its_log_holds_the_stop_string_already() -> None:
    made = row(stops=(b"BC",))

    made.resume(pack((65, 66, 67)), [])

    assert made.finish is not None
    assert made.finish.event == Finished("a", "stop", 3, 1)
    assert not made.has_uncommitted


def test_row_matches_a_stop_string_that_began_in_an_earlier_attempt() -> None:
    made = row(stops=(b"BC",))
    made.resume(pack((65, 66)), [])
    table = table_of(made)

    table.take_step(brought("a", 2, 67, 68))

    assert made.finish is not None
    assert made.finish.event == Finished("a", "stop", 3, 1, stats=Stats(1, (), (), 1, 1))


def test_table_names_a_row_for_the_engine_to_discard_when_a_stop_string_ends_it() -> None:
    made = row(stops=(b"B",))
    table = table_of(made)

    assert table.take_step(brought("a", 0, 65, 66, 67)) == [made]


def test_table_keeps_the_statistics_of_a_row_that_both_sides_ended_in_one_step() -> None:
    made = row(stops=(b"B",))
    table = table_of(made)
    step = StepResult(brought("a", 0, 65, 66).tokens, ended("a", "length").ends)

    assert table.take_step(step) == []

    assert made.finish is not None
    assert isinstance(made.finish.event, Finished)
    assert (made.finish.event.reason, made.finish.event.stats.cycles) == ("stop", 3)


def test_table_takes_no_more_tokens_of_a_row_that_has_ended() -> None:
    made = row(stops=(b"A",))
    table = table_of(made)
    table.take_step(brought("a", 0, 65))

    table.take_step(brought("a", 1, 66))
    table.take_step(ended("a", "length"))

    assert made.length == 1
    assert made.finish is not None
    assert made.finish.cause == "stop"


def test_table_ignores_what_the_engine_says_of_rows_it_does_not_know() -> None:
    table = table_of(row())
    step = StepResult(brought("b", 0, 1).tokens, ended("b", "stop").ends, (PrefillProgress("b:1", 1, 2),))

    assert table.take_step(step) == []
    table.reject("b:1", "no such row")

    assert len(table) == 1


def test_table_passes_the_engines_statistics_on() -> None:
    made = row()
    table = table_of(made)

    table.take_step(ended("a", "length"))

    assert made.finish is not None
    assert isinstance(made.finish.event, Finished)
    stats = made.finish.event.stats
    assert (stats.cycles, stats.drafted, stats.accepted, stats.min_width, stats.max_width) == (3, (3,), (2,), 1, 4)


def test_table_fails_a_row_that_the_engine_ended_with_an_error() -> None:
    made = row()
    table = table_of(made)

    table.take_step(ended("a", "error", "not a number"))

    assert made.finish is not None
    assert made.finish.event == Failed("a", "engine_error", "not a number")


def test_table_gathers_rows_in_prefill_without_tokens() -> None:
    batch = table_of(row()).gather(0.0)

    assert [(commit.position, commit.tokens) for commit in batch.commits] == [(0, b"")]
    assert batch.messages == {}


def test_table_gathers_one_message_for_each_listener() -> None:
    table = table_of(row("a", reply="x"), row("b", reply="x"), row("c", reply="y"), row("d", reply=""))
    for name in "abcd":
        table.take_step(brought(name, 0, 65))

    messages = table.gather(0.0).messages

    heard = {channel: [event.id for event in decode_events(message)] for channel, message in messages.items()}
    assert heard == {"x": ["a", "b"], "y": ["c"]}


def test_table_gathers_only_what_is_not_committed() -> None:
    table = table_of(row())
    table.take_step(brought("a", 0, 65, 66))
    commit_all(table)
    table.take_step(brought("a", 2, 67))

    batch = table.gather(0.0)

    assert (batch.commits[0].position, batch.commits[0].tokens) == (2, pack((67,)))
    assert decode_events(batch.messages["ear"]) == (Tokens("a", 2, pack((67,))),)


def test_table_tells_logprobs_with_their_tokens() -> None:
    table = table_of(row(top_logprobs=1))
    scored = RowTokens("a:1", 0, (65,), (TokenLogprob(-0.5, ((65, -0.5),)),))
    table.take_step(StepResult(tokens=(scored,)))

    batch = table.gather(0.0)

    assert len(batch.commits[0].logprobs) == 1
    assert decode_events(batch.messages["ear"]) == (Tokens("a", 0, pack((65,)), (Logprob(-0.5, ((65, -0.5),)),)),)


def test_table_tells_progress_now_and_then_and_the_last_of_it_always() -> None:
    table = table_of(row())

    def told(done: int, now_s: float) -> tuple[Any, ...]:
        table.take_step(StepResult(prefill=(PrefillProgress("a:1", done, 100),)))
        messages = table.gather(now_s).messages
        return decode_events(messages["ear"]) if messages else ()

    assert told(10, 0.0) == (Progress("a", 10, 100),)
    assert told(20, PROGRESS_EVERY_S / 2) == ()
    assert told(30, PROGRESS_EVERY_S) == (Progress("a", 30, 100),)
    assert told(100, PROGRESS_EVERY_S * 1.1) == (Progress("a", 100, 100),)


def test_tokens_that_come_while_a_commit_travels_stay_uncommitted() -> None:
    made = row()
    table = table_of(made)
    table.take_step(brought("a", 0, 65))
    batch = table.gather(0.0)
    table.take_step(brought("a", 1, 66))

    table.take_commit(batch, CommitResult())

    assert (made.committed, made.length) == (1, 2)


def test_row_drops_what_is_not_committed_when_it_is_cancelled() -> None:
    made = row()
    table = table_of(made)
    table.take_step(brought("a", 0, 65))
    batch = table.gather(0.0)
    table.take_step(brought("a", 1, 66))

    assert table.take_commit(batch, CommitResult(wanted_ends={"a": "client"})) == [made]

    assert made.finish is not None
    assert made.finish.event == Finished("a", "cancelled", 1, cause="client", stats=Stats(2, (), (), 1, 1))
    assert table.ended() == [made]


def test_row_that_has_ended_by_itself_is_not_cancelled() -> None:
    made = row()
    table = table_of(made)
    table.take_step(brought("a", 0, 65))
    table.take_step(ended("a", "length"))

    commit_all(table, CommitResult(wanted_ends={"a": "client"}))

    assert made.finish is not None
    assert made.finish.status == "finished"


@pytest.mark.parametrize(
    ("cause", "status"),
    [
        ("client", "cancelled"),
        ("operator", "cancelled"),
        ("listener", "cancelled"),
        ("limit", "cancelled"),
        ("shutdown", "cancelled"),
        ("deadline", "expired"),
        ("stop", "finished"),
    ],
)
def test_cause_decides_how_a_row_ends(cause: Cause, status: str) -> None:
    assert end_of(cause)[0] == status


def test_refused_row_is_taken_out_when_it_is_lost() -> None:
    lost, kept = row("a"), row("b")
    table = table_of(lost, kept)

    assert commit_all(table, CommitResult(refused=(Refusal("a", "lost", 0),))) == [lost]

    assert list(table) == [kept]


def test_refused_row_goes_back_when_the_log_is_short() -> None:
    made = row()
    table = table_of(made)
    table.take_step(brought("a", 0, 65, 66, 67))
    commit_all(table)

    assert commit_all(table, CommitResult(refused=(Refusal("a", "short", 1),))) == []

    assert table.gather(0.0).commits[0].tokens == pack((66, 67))


def test_refused_row_fails_when_the_log_holds_other_tokens() -> None:
    made = row()
    table = table_of(made)
    table.take_step(brought("a", 0, 65))

    assert commit_all(table, CommitResult(refused=(Refusal("a", "diverged", 1),))) == [made]

    assert made.finish is not None
    assert (made.finish.cause, made.finish.length) == ("diverged", -1)
    assert table.gather(0.0).rows == ()
    assert table.ended() == [made]


def test_answer_about_rows_that_were_dropped_meanwhile_changes_nothing() -> None:
    made = row()
    table = table_of(made)
    batch = table.gather(0.0)
    assert table.clear("lost") == [made]

    assert table.take_commit(batch, CommitResult(wanted_ends={"a": "client"})) == []
    assert table.take_commit(batch, CommitResult(refused=(Refusal("a", "lost", 0),))) == []

    assert made.finish is None


def test_row_is_forgotten_once_its_end_is_written() -> None:
    made = row()
    table = table_of(made)
    table.take_step(ended("a", "length"))

    table.take_finish(made, FinishResult("ok"))

    assert len(table) == 0


def test_row_with_tokens_to_commit_is_not_finished_yet() -> None:
    table = table_of(row())
    table.take_step(brought("a", 0, 65))

    table.take_step(ended("a", "length"))

    assert table.ended() == []


def test_two_attempts_at_a_request_are_two_rows() -> None:
    table = table_of(row())

    assert table.has_seat("a", 1)
    assert not table.has_seat("a", 2)
