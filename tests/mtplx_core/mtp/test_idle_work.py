"""Work for the time without rows: when it is done, how rows end it, and the probe that is measured anew in it."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from mtplx_core.engine import Geometry, Row
from mtplx_core.heads.attached import AttachedHead
from mtplx_core.models.loader import LoadedModel
from mtplx_core.models.trunk import Trunk
from mtplx_core.mtp.assemble import build_mtp_engine
from mtplx_core.mtp.idle_work import QUIET_S, IdleWork
from mtplx_core.mtp.probe import load_or_probe, probe_forwards
from tests.mtplx_core.driving import run

GEOMETRY = Geometry(decode_batch_max=2, max_context_tokens=1024, depth=1, prefill_chunk_tokens=64)
EPOCH_S = 1e9


class Work:
    """Three steps, and what was done of them."""

    def __init__(self, error: Exception | None = None) -> None:
        self.now_s = 0.0
        self.done: list[str] = []
        self.is_due = True
        self._error = error
        self.idle = IdleWork(self._steps, is_due=lambda: self.is_due, clock=lambda: self.now_s)

    def _steps(self) -> Generator[None, None, None]:
        for step in ("one", "two", "three"):
            self.done.append(step)
            if self._error is not None:
                raise self._error
            yield
        self.is_due = False


def test_nothing_is_done_until_a_lane_has_been_quiet_for_a_while() -> None:
    work = Work()

    assert work.idle.step()
    work.now_s = QUIET_S - 1
    work.idle.interrupt()
    work.now_s = QUIET_S + 1
    assert work.idle.step()

    assert work.done == []


def test_work_is_done_a_step_at_a_time_and_then_over() -> None:
    work = Work()
    work.now_s = QUIET_S

    assert [work.idle.step() for _ in range(5)] == [True, True, True, True, False]
    assert work.done == ["one", "two", "three"]


def test_row_that_comes_in_between_has_the_work_begun_anew_later_and_not_for_ever() -> None:
    work, begun = Work(), 0

    for _ in range(20):
        work.now_s += QUIET_S
        work.idle.step()
        work.idle.interrupt()
        begun = work.done.count("one")

    assert begun == 8
    assert not work.idle.step()
    assert "two" not in work.done


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), OSError("no space left")], ids=str)
def test_work_that_fails_is_left_alone(error: Exception) -> None:
    work = Work(error)
    work.now_s = QUIET_S

    assert [work.idle.step() for _ in range(3)] == [True, False, False]
    assert work.done == ["one"]


def parts_of(folder: Path) -> dict[str, Any]:
    (path,) = folder.iterdir()
    parts: dict[str, Any] = json.loads(path.read_text())
    return parts


def rewritten(folder: Path, **parts: Any) -> None:
    (path,) = folder.iterdir()
    path.write_text(json.dumps(parts_of(folder) | parts))


class Lane:
    """An engine over a folder of probes, on a clock that ticks with every look at it."""

    def __init__(self, loaded: LoadedModel, folder: Path, head: AttachedHead | None = None) -> None:
        ticks = itertools.count(0.0, 0.001)
        self._pause_s = 0.0
        self.engine: Any = build_mtp_engine(
            loaded, GEOMETRY, head=head, probe_dir=folder, clock=lambda: next(ticks) + self._pause_s
        )

    def quiet(self) -> None:
        self._pause_s += QUIET_S

    def idle(self) -> int:
        """Let a lane that has been quiet do all it has to do; returns in how many steps."""
        self.quiet()
        return next(step for step in itertools.count() if not self.engine.idle())


@pytest.fixture
def folder(loaded: LoadedModel, tmp_path: Path) -> Path:
    """With a whole probe of now in it."""
    Lane(loaded, tmp_path).engine.close()
    return tmp_path


def test_good_probe_is_not_measured_anew(loaded: LoadedModel, folder: Path) -> None:
    before = parts_of(folder)

    assert (before["is_whole"], before["spread"]) == (True, pytest.approx(0.0, abs=1e-6))
    assert Lane(loaded, folder).idle() == 0
    assert parts_of(folder) == before


@pytest.mark.parametrize(
    "fault",
    [{"is_whole": False, "seconds": [[1, 0, 0.5]]}, {"spread": 0.9}, {"made_s": EPOCH_S}, {"made_s": 9e9}],
    ids=["cut short", "busy machine", "old", "of a clock that was wrong"],
)
def test_doubtful_probe_is_used_and_measured_anew_while_the_lane_is_idle(
    loaded: LoadedModel, head: AttachedHead, folder: Path, fault: dict[str, Any]
) -> None:
    rewritten(folder, chunk_tokens=32, **fault)
    lane = Lane(loaded, folder, head)
    row = Row("row", tuple(range(70)), 4, ignore_eos=True)

    run(lane.engine, [row])
    steps = lane.idle()
    again = lane.idle()

    found = parts_of(folder)
    assert steps > 20
    assert again == 0
    assert (found["is_whole"], found["spread"]) == (True, pytest.approx(0.0, abs=1e-6))
    assert len(found["seconds"]) == 4
    assert abs(found["made_s"] - time.time()) < 3600
    assert found["draft_shares"].keys() == {head.name}
    assert found["chunk_tokens"] != 32
    lane.engine.admit(row)
    assert lane.engine.step().prefill[0].done == 32, "the lane still cuts prompts as it did"


def test_row_that_comes_while_a_lane_measures_is_decoded_and_the_measuring_begins_anew(
    loaded: LoadedModel, folder: Path
) -> None:
    rewritten(folder, is_whole=False)
    lane, other = Lane(loaded, folder), Lane(loaded, folder)
    whole = other.idle()
    lane.quiet()
    for _ in range(5):
        assert lane.engine.idle()

    heard = run(lane.engine, [Row("row", (5, 6, 7), 4, ignore_eos=True)])

    assert len(heard.tokens["row"]) == 4
    assert lane.idle() == whole > 5


def test_lane_with_rows_does_no_idle_work(loaded: LoadedModel, folder: Path) -> None:
    rewritten(folder, is_whole=False)
    lane = Lane(loaded, folder)
    lane.engine.admit(Row("row", (5, 6, 7), 4, ignore_eos=True))

    assert lane.idle() == 0


@pytest.mark.parametrize("version", [{"mlx": "0.0.1"}, {"mlx": None}, {"format": 1}], ids=str)
def test_probe_of_another_version_of_mlx_is_not_used(
    loaded: LoadedModel, folder: Path, version: dict[str, Any]
) -> None:
    good = parts_of(folder)
    rewritten(folder, seconds=[[1, 0, 77.0]], **version)

    Lane(loaded, folder).engine.close()

    found = parts_of(folder)
    assert found["mlx"] == good["mlx"]
    assert [point[:2] for point in found["seconds"]] == [point[:2] for point in good["seconds"]]
    assert max(seconds for _, _, seconds in found["seconds"]) < 1.0


def test_probe_says_that_it_was_cut_short_and_how_much_its_repetitions_differ(loaded: LoadedModel) -> None:
    slow, uneven = itertools.count(0.0, 1.0), itertools.accumulate(itertools.cycle((1e-3, 4e-3, 4e-3)))

    cut = probe_forwards(Trunk(loaded.model), GEOMETRY, clock=lambda: next(slow), budget_s=5.0)
    busy = probe_forwards(Trunk(loaded.model), GEOMETRY, clock=lambda: next(uneven))

    assert (cut.is_whole, cut.spread, cut.is_doubtful) == (False, 0.0, True)
    assert (busy.is_whole, busy.is_doubtful) == (True, True)
    assert busy.spread > 0.5


def test_keys_are_measured_where_rows_may_be_long(loaded: LoadedModel, tmp_path: Path) -> None:
    trunk = Trunk(loaded.model)
    short = Geometry(decode_batch_max=2, max_context_tokens=300, depth=1, prefill_chunk_tokens=64)
    times = itertools.accumulate(itertools.cycle((0.0, 1e-3)))

    probe = load_or_probe(trunk, GEOMETRY, identity="tiny@1", folder=tmp_path, clock=lambda: next(times))
    of_short = probe_forwards(trunk, short, clock=lambda: next(times))

    assert of_short.key_s == (0.0, 0.0)
    assert all(part >= 0 for part in probe.key_s)
    assert probe.cost_table(GEOMETRY).cost(2, 1) == pytest.approx(probe.seconds[2, 1])
