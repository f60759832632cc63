"""Trains a head on recorded states: batches, steps, validation, checkpoints. The trunk is never run nor changed.

A run that was killed goes on from its last checkpoint and ends as it would have; what a step does depends on the
recipe and the step's number alone.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten, tree_unflatten

from mtplx_core.errors import ForgeError
from mtplx_core.forge.acceptance import replay
from mtplx_core.forge.curve import Point, draw_curve
from mtplx_core.forge.lessons import (
    HoldOut,
    LessonBatch,
    draft_vocabulary,
    held_out_lessons,
    shared_opening,
    training_batches,
)
from mtplx_core.forge.losses import DraftTable, draft_loss, state_loss
from mtplx_core.forge.optimiser import Arrays, LearningRates, apply, average_of, start_state
from mtplx_core.forge.recipe import Recipe
from mtplx_core.forge.ridge import start_head
from mtplx_core.forge.states import load_lessons, shard_files
from mtplx_core.heads.attached import AttachedHead, save_attached_head
from mtplx_core.models.trunk import Trunk

logger = logging.getLogger(__name__)

_RIDGE_SHARDS = 8
_LOSS_WEIGHT = 0.02
_DEEPER = 0.5
"""Weight of each depth, of the one before it."""
nn: Any = mlx.nn


class Step(NamedTuple):
    """Where training is."""

    number: int
    done: float
    """Share of the run behind it."""
    loss: float
    acceptance: float
    """At the last validation."""


OnStep = Callable[[Step], None]


@dataclass
class _Progress:
    """What a checkpoint keeps besides arrays."""

    step: int = 0
    loss: float = 0.0
    points: list[Point] = field(default_factory=list)
    is_finished: bool = False


class Trainer:
    """One training run over a folder of states.

    Args:
        trunk: the model the states were recorded from.
        states: the folder of shards.
        run: where checkpoints lie; an unfinished run in it is resumed, if its recipe is the same.
        recipe: how to train.
        hold_out: which prompts are kept from training.

    Raises:
        ForgeError: no states, or a run of another recipe in `run`.
    """

    def __init__(self, trunk: Trunk, states: Path, run: Path, *, recipe: Recipe, hold_out: HoldOut) -> None:
        self._trunk = trunk
        self._recipe = recipe
        self._hold_out = hold_out
        self._run = run
        self._shards = shard_files(states)
        self._progress = _Progress()
        samples = [lesson for shard in self._shards[:_RIDGE_SHARDS] for lesson in load_lessons(shard)]
        samples = [lesson for lesson in samples if not hold_out.has(lesson.prompt)]
        if not samples:
            raise ForgeError("every sequence is held out")
        self._opening = shared_opening(samples)
        self._held_out = held_out_lessons(self._shards, hold_out, limit=recipe.validation_sequences)
        self._start(samples)

    @property
    def head(self) -> AttachedHead:
        """The head with the averaged weights."""
        self._head.load_weights(list(average_of(self._state).items()))
        self._head.eval()
        return self._head

    @property
    def points(self) -> Sequence[Point]:
        return self._progress.points

    @property
    def is_finished(self) -> bool:
        return self._progress.is_finished

    def train(self, *, on_step: OnStep, steps: int | None = None) -> None:
        """Train to the end of the recipe, or until `steps` steps are done; called again, it goes on from there."""
        if self.is_finished:
            return
        if not self._progress.points:
            self._validate()
        is_cut = False
        for number, (done, batch) in enumerate(self._batches(), start=1):
            if number <= self._progress.step:
                continue
            if is_cut := steps is not None and number > steps:
                break
            self._step(number, batch, done=done)
            if number % self._recipe.validate_every == 0:
                self._validate()
                self._save()
            on_step(Step(number, done, self._progress.loss, self._progress.points[-1].acceptance))
        if self.points[-1].step < self._progress.step:
            self._validate()
        self._progress.is_finished = not is_cut
        self._save()

    def save_head(self, folder: Path, *, trained_on: str) -> None:
        """Write the head, in half precision, and its learning curve."""
        head = self.head
        head.set_dtype(mx.float16)
        facts = {
            "steps": self._progress.step,
            "held_out_acceptance": round(self.points[-1].acceptance, 4),
            "recipe": asdict(self._recipe),
        }
        save_attached_head(head, folder, trained_on=trained_on, facts=facts)
        draw_curve(self.points, folder / "curve.svg", title=f"MTP head for {trained_on}")

    def _start(self, samples: Sequence[Any]) -> None:
        recipe, saved = self._recipe, self._read()
        size = min(recipe.draft_vocabulary, self._trunk.vocab_size)
        if saved is None:
            ids = draft_vocabulary(self._shards, self._hold_out, size=size, vocab_size=self._trunk.vocab_size)
            self._head = start_head(self._trunk, ids, samples, max_depth=recipe.max_depth)
            self._weights: Arrays = dict(tree_flatten(self._head.trainable_parameters()))
            self._state = start_state(self._weights)
        else:
            ids = saved.pop("draft_ids").tolist()  # type: ignore[assignment]  # mlx types any list
            self._head = AttachedHead(self._trunk, ids, max_depth=recipe.max_depth)
            self._weights = {name[8:]: value for name, value in saved.items() if name.startswith("weights.")}
            self._state = {name[6:]: value for name, value in saved.items() if name.startswith("state.")}
        rows = _unembedding_rows(self._head, self._trunk)
        self._table = DraftTable.of(rows, self._head.draft_ids, vocab_size=self._trunk.vocab_size)
        self._gradients = mx.value_and_grad(self._loss)

    def _batches(self) -> Iterator[tuple[float, LessonBatch]]:
        """All batches of the run, each with the share of the run behind it."""
        recipe = self._recipe
        epoch = 0
        while epoch < recipe.epochs:
            batches = training_batches(
                self._shards,
                self._hold_out,
                positions=recipe.positions,
                seed=recipe.seed + epoch,
                opening=self._opening,
            )
            for share, batch in batches:
                done = (epoch + share) / recipe.epochs
                if done >= 1:
                    return
                yield done, batch
            epoch += 1

    def _step(self, number: int, batch: LessonBatch, *, done: float) -> None:
        recipe = self._recipe
        mx.random.seed(recipe.seed + number)
        factor = recipe.rate_at(done)
        rates = LearningRates(recipe.matrix_rate * factor, recipe.gain_rate * factor, recipe.decay, recipe.average)
        depth = recipe.max_depth if done >= recipe.unrolled_from else 1
        state_weight = recipe.state_weight if done < recipe.unrolled_from else 0.0
        loss, gradients = self._gradients(self._weights, batch, depth=depth, state_weight=state_weight)
        self._weights, self._state = apply(self._weights, gradients, self._state, step=number, rates=rates)
        mx.eval(self._weights, self._state, loss)
        value, progress = float(loss), self._progress
        progress.loss = value if progress.step == 0 else progress.loss + _LOSS_WEIGHT * (value - progress.loss)
        progress.step = number

    def _loss(self, weights: Arrays, batch: LessonBatch, *, depth: int, state_weight: float) -> mx.array:
        recipe, head = self._recipe, self._head
        head.update(tree_unflatten(list(weights.items())))
        embedded = self._trunk.embed(batch.tokens).astype(mx.float32)
        pairs = mx.where(batch.is_answer, 1.0, recipe.prompt_weight) * batch.is_pair
        scored = mx.random.permutation(pairs.size)[: max(1, round(recipe.scored_share * pairs.size))]
        noise = mx.random.uniform(-1.0, 1.0, batch.hidden.shape) * (recipe.noise * mx.std(batch.hidden))
        hidden = batch.hidden + noise
        total = mx.array(0.0)
        predicted = hidden[:, :-1]
        for ahead in range(depth):
            # Deeper, the head's own state of the pair before stands in for the trunk's.
            own = mx.concatenate([hidden[:, :ahead], predicted[:, ahead - 1 : -1]], axis=1) if ahead else predicted
            predicted = head.forward(own, embedded)
            known = pairs * (mx.arange(pairs.shape[1]) >= ahead)
            drafted = draft_loss(
                predicted, batch, self._table, weights=known, sharpness=recipe.sharpness, scored=scored
            )
            total = total + _DEEPER**ahead * drafted
            if state_weight and ahead == 0:
                total = total + state_weight * state_loss(predicted, batch, weights=pairs)
        return total

    def _validate(self) -> None:
        greedy = [lesson for lesson in self._held_out if lesson.temperature == 0] or self._held_out
        found = replay(self.head, greedy, with_lookup=False)
        point = Point(self._progress.step, self._progress.loss, found.head)
        self._progress.points.append(point)
        logger.info("step %d: loss %.3f, held-out acceptance %.4f", *point)

    def _read(self) -> Arrays | None:
        """The arrays of the run to resume, if there is one."""
        path = self._run / "progress.json"
        if not path.exists():
            return None
        saved = json.loads(path.read_text())
        if saved.pop("recipe") != asdict(self._recipe):
            raise ForgeError(f"{self._run} holds a run of another recipe; name another folder or remove it")
        points = [Point(*point) for point in saved.pop("points")]
        self._progress = _Progress(points=points, **saved)
        arrays: Any = mx.load(str(self._run / f"step-{self._progress.step}.safetensors"))
        return dict(arrays)

    def _save(self) -> None:
        """Arrays first; the small file that names them is what makes them count."""
        self._run.mkdir(parents=True, exist_ok=True)
        step = self._progress.step
        arrays = {f"weights.{name}": value for name, value in self._weights.items()}
        arrays |= {f"state.{name}": value for name, value in self._state.items()}
        mx.save_safetensors(str(self._run / f"step-{step}.safetensors"), {**arrays, "draft_ids": self._head.draft_ids})
        part = self._run / ".progress.json"
        part.write_text(json.dumps({**asdict(self._progress), "recipe": asdict(self._recipe)}))
        os.replace(part, self._run / "progress.json")
        for old in self._run.glob("step-*.safetensors"):
            if old.name != f"step-{step}.safetensors":
                old.unlink()


def _unembedding_rows(head: AttachedHead, trunk: Trunk) -> mx.array:
    """What the draft vocabulary's logits are the product of hidden states with, (draft vocabulary, hidden).

    Raises:
        ForgeError: the model bends its logits (a soft cap), so they are no such product.
    """
    identity = mx.eye(trunk.hidden_size, dtype=trunk.dtype)[None]
    rows = head.logits(identity)[0].T
    doubled = head.logits(2 * identity)[0].T
    if not mx.allclose(doubled, 2 * rows, rtol=1e-2, atol=1e-3).item():
        raise ForgeError("the model caps its logits; a head for it cannot be trained here")
    return rows
