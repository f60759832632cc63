"""Killed and started again: collecting and training go on where they were. Runs on a tiny llama trained here."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mtplx_core.build import build_engine
from mtplx_core.engine import Geometry, SchedulerMode
from mtplx_core.errors import ForgeError
from mtplx_core.forge.answers import TrainingPrompt, answer_files, collect_answers, load_answers
from mtplx_core.forge.lessons import HoldOut
from mtplx_core.forge.recipe import Recipe
from mtplx_core.forge.states import load_lessons, record_states, shard_files
from mtplx_core.forge.trainer import Step, Trainer
from mtplx_core.models.loader import LoadedModel
from mtplx_core.models.trunk import Trunk

RECIPE = Recipe(epochs=1, positions=512, draft_vocabulary=62, validate_every=4, validation_sequences=8)


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.fixture(scope="module")
def whole(counter: LoadedModel, states: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A training that nothing disturbed."""
    trainer = trainer_in(tmp_path_factory.mktemp("whole"), counter, states)
    trainer.train(on_step=lambda step: None)
    return trainer


def trainer_in(folder: Path, counter: LoadedModel, states: Path) -> Trainer:
    return Trainer(Trunk(counter.model), states, folder, recipe=RECIPE, hold_out=HoldOut())


def test_collecting_asks_only_what_has_no_answer_when_it_goes_on(
    counter: LoadedModel, prompts: list[TrainingPrompt], tmp_path: Path
) -> None:
    engine = build_engine(SchedulerMode.AR_BATCH, counter, geometry=Geometry(decode_batch_max=8, max_context_tokens=64))
    collect_answers(engine, prompts[:10], tmp_path, max_tokens=4, on_progress=lambda done, total: None)
    asked: list[int] = []

    collect_answers(engine, prompts[:16], tmp_path, max_tokens=4, on_progress=lambda done, total: asked.append(done))

    assert asked == [11, 12, 13, 14, 15, 16]
    kept = [load_answers(file).prompt_index for file in answer_files(tmp_path)]
    assert sorted(int(index) for part in kept if part is not None for index in part) == list(range(16))


def test_recording_leaves_whole_shards_alone_when_it_goes_on(
    counter: LoadedModel, answers: Path, states: Path, tmp_path: Path
) -> None:
    first, *_ = shard_files(states)
    (tmp_path / first.name).write_bytes(first.read_bytes())
    before = (tmp_path / first.name).stat().st_mtime_ns

    record_states(Trunk(counter.model), answers, tmp_path, on_progress=lambda done, total: None)

    assert (tmp_path / first.name).stat().st_mtime_ns == before
    assert [file.name for file in shard_files(tmp_path)] == [file.name for file in shard_files(states)]


def test_training_ends_the_same_when_it_was_killed_between(
    counter: LoadedModel, states: Path, whole: Trainer, tmp_path: Path
) -> None:
    def kill(step: Step) -> None:
        if step.number == 6:
            raise Killed

    with pytest.raises(Killed):
        trainer_in(tmp_path, counter, states).train(on_step=kill)

    resumed = trainer_in(tmp_path, counter, states)
    resumed.train(on_step=lambda step: None)

    assert mx.array_equal(resumed.head.fc.weight, whole.head.fc.weight)
    assert resumed.points == whole.points


def test_training_that_was_told_to_stop_can_be_saved_and_goes_on(
    counter: LoadedModel, states: Path, whole: Trainer, tmp_path: Path
) -> None:
    first = trainer_in(tmp_path, counter, states)
    first.train(on_step=lambda step: None, steps=5)
    second = trainer_in(tmp_path, counter, states)
    second.train(on_step=lambda step: None)

    assert (first.is_finished, first.points[-1].step) == (False, 5)
    assert second.is_finished
    assert mx.array_equal(second.head.fc.weight, whole.head.fc.weight)


def test_training_refuses_a_folder_with_a_run_of_another_recipe(
    counter: LoadedModel, states: Path, tmp_path: Path
) -> None:
    trainer_in(tmp_path, counter, states).train(on_step=lambda step: None, steps=5)
    other = Recipe(epochs=2, positions=512, draft_vocabulary=62)

    with pytest.raises(ForgeError, match="another recipe"):
        Trainer(Trunk(counter.model), states, tmp_path, recipe=other, hold_out=HoldOut())


def test_states_agree_with_the_model_run_on_the_sequence_alone(counter: LoadedModel, states: Path) -> None:
    lesson = load_lessons(shard_files(states)[0])[0]
    logits = counter.model(mx.array([lesson.tokens.tolist()]))[0]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    best = logprobs.argmax(axis=-1)

    assert best.tolist() == lesson.top_ids[:, 0].tolist()
    assert mx.allclose(logprobs.max(axis=-1), mx.array(lesson.top_logprobs[:, 0]), atol=1e-2)
