"""The scripted engine keeps the engine contract and plays its script. Engine: scripted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from mtplx_core.engine import Geometry, PrefillProgress, Row, StepResult
from mtplx_core.engines.scripted import (
    Script,
    ScriptedEngine,
    ScriptedFault,
    StepWork,
    scripted_completion,
    scripted_token,
    sleeping_pace,
)
from mtplx_core.errors import EngineDeadError, RowRejectedError
from tests.mtplx_core.driving import run

GEOMETRY = Geometry(decode_batch_max=3, max_context_tokens=64, prefill_chunk_tokens=8)
ROW = Row("row", (1, 2, 3), 20)
OTHER = Row("other", (9, 9), 11)
ENDING = Script(eos_token_id=7, eos_position=lambda prompt: 5)


def test_engine_plays_the_same_token_for_the_same_prompt_and_position() -> None:
    tokens = run(ScriptedEngine(GEOMETRY), [ROW]).tokens["row"]

    assert tokens == [scripted_token(ROW.prompt, position, 256) for position in range(20)]
    assert len(set(tokens)) > 10


def test_engine_plays_other_tokens_for_another_prompt() -> None:
    heard = run(ScriptedEngine(GEOMETRY), [ROW, replace(ROW, row_id="other", prompt=(1, 2, 4))])

    assert heard.tokens["row"] != heard.tokens["other"]


@pytest.mark.parametrize("tokens_per_step", [(1,), (4,), (1, 3, 2)])
def test_engine_plays_the_same_text_in_steps_of_any_size(tokens_per_step: tuple[int, ...]) -> None:
    script = Script(tokens_per_step=tokens_per_step)

    heard = run(ScriptedEngine(GEOMETRY, script), [ROW, OTHER])

    assert tuple(heard.tokens["row"]) == scripted_completion(ROW, script)
    assert tuple(heard.tokens["other"]) == scripted_completion(OTHER, script)


def test_engine_follows_the_pattern_of_step_sizes() -> None:
    engine = ScriptedEngine(GEOMETRY, Script(tokens_per_step=(1, 3)))
    engine.admit(ROW)

    sizes = [len(engine.step().tokens[0].tokens) for _ in range(4)]

    assert sizes == [1, 3, 1, 3]


def test_resumed_row_goes_on_behind_its_committed_tokens() -> None:
    whole = scripted_completion(ROW, Script())

    heard = run(ScriptedEngine(GEOMETRY), [replace(ROW, committed=whole[:7])])

    assert heard.starts["row"] == 7
    assert tuple(heard.tokens["row"]) == whole[7:]


def test_row_ends_where_the_script_puts_the_end_of_sequence() -> None:
    heard = run(ScriptedEngine(GEOMETRY, ENDING), [ROW])

    assert heard.tokens["row"][-1] == 7
    assert len(heard.tokens["row"]) == 6
    assert heard.ends["row"].reason == "stop"


def test_row_plays_through_the_end_of_sequence_when_told_to() -> None:
    heard = run(ScriptedEngine(GEOMETRY, ENDING), [replace(ROW, ignore_eos=True)])

    assert len(heard.tokens["row"]) == 20
    assert heard.ends["row"].reason == "length"


def test_end_of_sequence_is_played_nowhere_else() -> None:
    script = Script(vocab_size=3, eos_token_id=1)

    heard = run(ScriptedEngine(GEOMETRY, script), [replace(ROW, prompt=(1,), max_tokens=60)])

    assert 1 not in heard.tokens["row"]


def test_row_ends_at_a_stop_token_inside_a_step() -> None:
    whole = scripted_completion(ROW, Script())
    row = replace(ROW, stop_token_ids=frozenset({whole[5]}))

    heard = run(ScriptedEngine(GEOMETRY, Script(tokens_per_step=(4,))), [row])

    assert tuple(heard.tokens["row"]) == whole[: whole.index(whole[5]) + 1]
    assert heard.ends["row"].reason == "stop"


def test_tokens_below_the_first_are_never_played() -> None:
    script = Script(vocab_size=40, first_token=17)

    assert min(run(ScriptedEngine(GEOMETRY, script), [ROW]).tokens["row"]) >= 17


def test_prompt_is_fed_in_chunks_before_the_first_token() -> None:
    engine = ScriptedEngine(GEOMETRY)
    engine.admit(replace(ROW, prompt=tuple(range(20))))

    results = [engine.step() for _ in range(3)]

    assert [result.prefill[0] for result in results] == [PrefillProgress("row", done, 20) for done in (8, 16, 20)]
    assert [len(result.tokens) for result in results] == [0, 0, 1]


def test_pace_is_told_what_a_step_does() -> None:
    heard: list[StepWork] = []
    engine = ScriptedEngine(GEOMETRY, pace=heard.append)
    engine.admit(ROW)
    engine.admit(OTHER)

    engine.step()
    engine.step()

    assert heard == [StepWork(2, 5), StepWork(2, 0)]


def test_logprobs_come_when_asked_for() -> None:
    heard = run(ScriptedEngine(GEOMETRY), [replace(ROW, top_logprobs=2), OTHER])

    assert len(heard.logprobs["row"]) == 20
    assert all(
        entry.top[0] == (token, entry.logprob)
        for entry, token in zip(heard.logprobs["row"], heard.tokens["row"], strict=True)
    )
    assert not heard.logprobs["other"]


def test_row_fault_ends_that_row_alone_and_keeps_what_came_before() -> None:
    script = Script(tokens_per_step=(3,), faults=(ScriptedFault("row", 4, strikes=lambda row: row.row_id == "row"),))

    heard = run(ScriptedEngine(GEOMETRY, script), [ROW, OTHER])

    assert tuple(heard.tokens["row"]) == scripted_completion(ROW, Script())[:4]
    assert heard.ends["row"].reason == "error"
    assert heard.ends["other"].reason == "length"


def test_dead_fault_makes_every_later_step_raise() -> None:
    engine = ScriptedEngine(GEOMETRY, Script(faults=(ScriptedFault("dead", 1),)))
    engine.admit(ROW)
    engine.step()

    for _ in range(2):
        with pytest.raises(EngineDeadError):
            engine.step()


def test_hang_fault_blocks_in_what_it_was_given() -> None:
    hangs: list[int] = []
    engine = ScriptedEngine(GEOMETRY, Script(faults=(ScriptedFault("hang", 2),)), hang=lambda: hangs.append(1))

    run(engine, [ROW])

    assert hangs == [1]


def test_crash_fault_kills_the_process() -> None:
    code = (
        "from mtplx_core.engine import *; from mtplx_core.engines.scripted import *\n"
        "engine = ScriptedEngine(Geometry(), Script(faults=(ScriptedFault('crash'),)))\n"
        "engine.admit(Row('row', (1,), 3)); engine.step()"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9


def test_scripted_engine_imports_no_mlx() -> None:
    code = "import sys, mtplx_core.engines.scripted; sys.exit('mlx' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_discarded_row_is_heard_of_no_more() -> None:
    engine = ScriptedEngine(GEOMETRY)
    engine.admit(ROW)
    engine.step()

    engine.discard("row")

    assert engine.active_rows == 0
    assert engine.step() == StepResult()


def test_row_that_had_committed_everything_ends_without_a_token() -> None:
    heard = run(ScriptedEngine(GEOMETRY), [Row("row", (1,), 2, committed=(5, 6))])

    assert heard.ends["row"].reason == "length"
    assert not heard.tokens["row"]


BAD: dict[str, Callable[[], Row]] = {
    "same id": lambda: ROW,
    "too long": lambda: replace(OTHER, max_tokens=63),
    "no prompt": lambda: replace(OTHER, prompt=()),
    "outside the vocabulary": lambda: replace(OTHER, prompt=(256,)),
}


@pytest.mark.parametrize("make", BAD.values(), ids=BAD.keys())
def test_row_that_breaks_a_bound_is_refused(make: Callable[[], Row]) -> None:
    engine = ScriptedEngine(GEOMETRY)
    engine.admit(ROW)

    with pytest.raises(RowRejectedError):
        engine.admit(make())


def test_more_rows_than_the_geometry_holds_are_refused() -> None:
    engine = ScriptedEngine(GEOMETRY)
    for index in range(3):
        engine.admit(replace(ROW, row_id=str(index)))

    with pytest.raises(RowRejectedError):
        engine.admit(ROW)


def test_snapshot_counts() -> None:
    engine = ScriptedEngine(GEOMETRY)
    engine.admit(ROW)
    engine.step()

    counts = {"active_rows": 1, "prefill_rows": 0, "paused_rows": 0, "steps": 1, "tokens": 1}
    assert engine.snapshot() == {"mode": "scripted", **counts}


def test_no_step_ends_while_the_pace_is_held() -> None:
    answers = iter([True, True, False])

    sleeping_pace(0.0, is_held=lambda: next(answers))(StepWork(decoding_rows=1, prefill_tokens=0))

    assert list(answers) == []
