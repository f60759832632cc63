"""The forge from end to end: answers, states, a trained head, a verdict. Runs on a tiny llama trained here."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtplx_core.forge.lessons import HoldOut, held_out_lessons
from mtplx_core.forge.recipe import Recipe
from mtplx_core.forge.states import Lesson, shard_files
from mtplx_core.forge.trainer import Trainer
from mtplx_core.forge.verify import Report, Trials, judge, verify
from mtplx_core.heads import AttachedHead, load_attached_head
from mtplx_core.models.loader import LoadedModel
from mtplx_core.models.trunk import Trunk

RECIPE = Recipe(epochs=6, positions=512, draft_vocabulary=62, validate_every=10, validation_sequences=20)
TRIALS = Trials(widths=(1, 4), tokens=24, rounds=1)


@pytest.fixture(scope="module")
def trainer(counter: LoadedModel, states: Path) -> Trainer:
    trainer = Trainer(Trunk(counter.model), states, states.parent / "run", recipe=RECIPE, hold_out=HoldOut())
    trainer.train(on_step=lambda step: None)
    return trainer


@pytest.fixture(scope="module")
def head(trainer: Trainer, counter: LoadedModel, states: Path) -> AttachedHead:
    folder = states.parent / "head"
    trainer.save_head(folder, trained_on=counter.identity)
    return load_attached_head(folder, Trunk(counter.model))


@pytest.fixture(scope="module")
def held_out(states: Path) -> list[Lesson]:
    return held_out_lessons(shard_files(states), HoldOut(), limit=20)


@pytest.fixture(scope="module")
def report(counter: LoadedModel, head: AttachedHead, held_out: list[Lesson]) -> Report:
    return verify(counter, head, held_out, trials=TRIALS, on_progress=lambda done, total: None)


def test_head_starts_at_the_ridge_map_and_learns_from_there(trainer: Trainer) -> None:
    first, last = trainer.points[0].acceptance, trainer.points[-1].acceptance

    assert first > 0.3
    assert last > max(first, 0.8)


def test_head_keeps_its_acceptance_when_saved_and_loaded(trainer: Trainer, report: Report) -> None:
    assert report.facts["held_out"]["greedy"]["head"] == pytest.approx(trainer.points[-1].acceptance, abs=0.01)


def test_head_is_accepted_in_the_engine_as_often_as_in_the_replay(report: Report) -> None:
    replayed = report.facts["held_out"]["greedy"]["lookup_first"]
    decoded = report.facts["engine"]["4"]["head_depth_1"]["accepted_by_place"][0]

    assert decoded == pytest.approx(replayed, abs=0.1)
    assert report.facts["engine"]["4"]["head_depth_2"]["accepted_by_place"][1] > 0.6


def test_head_changes_no_output(report: Report) -> None:
    assert report.facts["audit"]["passed"]
    assert report.facts["audit"]["tokens"] >= 4 * TRIALS.tokens


def test_report_holds_acceptance_and_speed_at_every_width(report: Report) -> None:
    assert set(report.facts["engine"]) == {"1", "4"}
    for ways in report.facts["engine"].values():
        assert ways["plain_tokens_per_s"] > 0
        assert {"lookup", "head_depth_1", "head_depth_2"} < set(ways)
    assert 0 < report.facts["sampled"]["accepted_by_place"][0] <= 1


@pytest.mark.parametrize(
    ("lookup", "head", "is_exact", "pays", "why"),
    [
        (0.9, 1.2, True, True, "1.20 times"),
        (1.19, 1.2, True, False, "the least that pays"),
        (0.9, 0.95, True, False, "the least that pays"),
        (0.9, 1.2, False, False, "differ from plain decoding"),
    ],
    ids=["faster", "no faster than lookup", "slower than plain", "not exact"],
)
def test_head_pays_only_when_it_is_exact_and_faster(
    *, lookup: float, head: float, is_exact: bool, pays: bool, why: str
) -> None:
    speed = {"1": {"plain_tokens_per_s": 10.0, "lookup": {"speed": lookup}, "head_depth_1": {"speed": head}}}

    verdict, reason = judge(speed, is_exact=is_exact)

    assert verdict is pays
    assert why in reason


def test_saved_head_comes_with_its_curve(head: AttachedHead, states: Path) -> None:
    assert (states.parent / "head" / "curve.svg").read_text().startswith("<svg")
