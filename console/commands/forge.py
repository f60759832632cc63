"""`mtplx forge`: collect, train, verify. Files, flags and progress bars; the engine room does the work.

Mount it with `cli.add_command(forge)`. Everything that imports MLX is imported once a command runs, behind the BLAS.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from console.commands.fetch import cache_dir_of
from console.outputs import NewFolder
from console.settings import load
from mtplx_core.forge.recipe import Recipe
from mtplx_core.models.fetch import default_model_dir

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from mtplx_core.forge.answers import TrainingPrompt
    from mtplx_core.models.loader import LoadedModel

_FOLDER = NewFolder()
_DEFAULTS = Recipe()
_PATH = click.Path(path_type=Path, exists=True)
_MODEL = click.option("--model", default=None, help="Model folder or hub id.  [default: the fetched default model]")


@click.group()
def forge() -> None:
    """Make a multi-token-prediction head for a model that has none."""


@forge.command()
@_MODEL
@click.option("--prompts", type=_PATH, help="File with one prompt a line, for the model to answer first.")
@click.option("--answers", type=_PATH, help="File or folder of answers there are already.")
@click.option("--into", type=_FOLDER, required=True, help="Where answers and states go; called again, it goes on.")
@click.option("--temperatures", default="0,0.4,0.8", show_default=True, help="Prompts take these in turn.")
@click.option("--max-tokens", default=200, show_default=True, help="Of one answer.")
@click.option("--rows", default=32, show_default=True, help="Prompts answered together.")
def collect(
    model: str | None,
    prompts: Path | None,
    answers: Path | None,
    into: Path,
    temperatures: str,
    max_tokens: int,
    rows: int,
) -> None:
    """Let the model answer prompts and record what it thought at every token."""
    if (prompts is None) == (answers is None):
        raise click.UsageError("name either --prompts or --answers")
    loaded = _load(model)
    from mtplx_core.forge.states import record_states
    from mtplx_core.models.trunk import Trunk

    if prompts is not None:
        answers = into / "answers"
        asked = _prompts(loaded, prompts, [float(part) for part in temperatures.split(",")])
        _answer(loaded, asked, answers, max_tokens=max_tokens, rows=rows)
    assert answers is not None
    with _bar("states, tokens") as advance:
        record_states(Trunk(loaded.model), answers, into / "states", on_progress=advance)


@forge.command()
@_MODEL
@click.option("--states", type=_PATH, required=True, help="Folder that `collect` filled.")
@click.option("--run", type=_FOLDER, required=True, help="Where checkpoints and the head go; called again, it goes on.")
@click.option(
    "--hold-out", type=_PATH, help="File with one topic a line: prompts that name one are kept from training."
)
@click.option("--epochs", default=_DEFAULTS.epochs, show_default=True)
@click.option("--positions", default=_DEFAULTS.positions, show_default=True, help="Pairs of tokens in a batch.")
@click.option(
    "--depth", "max_depth", default=_DEFAULTS.max_depth, show_default=True, help="Tokens it learns to draft in a row."
)
@click.option("--draft-vocabulary", default=_DEFAULTS.draft_vocabulary, show_default=True)
@click.option("--steps", type=click.IntRange(1), help="Save the head after so many steps; called again, it goes on.")
def train(
    model: str | None,
    states: Path,
    run: Path,
    hold_out: Path | None,
    steps: int | None,
    **recipe: Any,
) -> None:
    """Train a head on recorded states."""
    loaded = _load(model)
    from mtplx_core.forge.lessons import HoldOut
    from mtplx_core.forge.trainer import Trainer
    from mtplx_core.models.trunk import Trunk

    kept = HoldOut(_phrases(loaded, hold_out))
    trainer = Trainer(Trunk(loaded.model), states, run, recipe=Recipe(**recipe), hold_out=kept)
    with _bar("training, percent", extra="{task.fields[note]}") as advance:
        trainer.train(
            on_step=lambda step: advance(
                round(100 * step.done), 100, f"loss {step.loss:.3f}, held-out acceptance {step.acceptance:.3f}"
            ),
            steps=steps,
        )
    trainer.save_head(run / "head", trained_on=loaded.identity)
    click.echo(f"mtplx: head at {run / 'head'}, not verified yet", err=True)


@forge.command()
@_MODEL
@click.option("--states", type=_PATH, required=True, help="Folder that `collect` filled.")
@click.option("--head", type=_PATH, required=True, help="Folder of the head.")
@click.option("--hold-out", type=_PATH, help="The same file as for `train`.")
@click.option("--save", type=_FOLDER, help="Where the head goes if it pays, with its report.")
@click.option("--tokens", default=64, show_default=True, help="Of each answer.")
@click.option("--widths", default="1,4,8", show_default=True, help="Numbers of rows to decode together.")
@click.option("--sequences", default=100, show_default=True, help="Held-out answers of each temperature to replay.")
def verify(
    model: str | None,
    states: Path,
    head: Path,
    hold_out: Path | None,
    save: Path | None,
    tokens: int,
    widths: str,
    sequences: int,
) -> None:
    """Measure a head on held-out prompts, audit what it helped to decode, and save it if it pays."""
    loaded = _load(model)
    from mtplx_core.forge.lessons import HoldOut, held_out_lessons
    from mtplx_core.forge.states import shard_files
    from mtplx_core.forge.verify import Trials
    from mtplx_core.forge.verify import verify as run_verify
    from mtplx_core.heads.attached import load_attached_head
    from mtplx_core.models.trunk import Trunk

    attached = load_attached_head(head, Trunk(loaded.model))
    kept = HoldOut(_phrases(loaded, hold_out))
    lessons = held_out_lessons(shard_files(states), kept, limit=sequences)
    with _bar("verifying, runs") as advance:
        trials = Trials(widths=tuple(int(part) for part in widths.split(",")), tokens=tokens)
        report = run_verify(loaded, attached, lessons, trials=trials, on_progress=advance)
    told = json.dumps(report.as_json(), indent=2) + "\n"
    (head / "verify.json").write_text(told)
    click.echo(told)
    if report.pays and save is not None:
        _copy(head, save)
    if not report.pays:
        raise click.ClickException(f"this head does not pay: {report.why}")


def _load(model: str | None) -> LoadedModel:
    from mtplx_core.blas import load_blas

    load_blas()
    from mtplx_core.models.loader import load_model

    settings = load({}, environ=os.environ, directory=Path.cwd())
    cache_dir = cache_dir_of(settings, os.environ)
    return load_model(model or settings.model or default_model_dir(cache_dir), cache_dir=cache_dir)


def _answer(
    loaded: LoadedModel, prompts: Sequence[TrainingPrompt], folder: Path, *, max_tokens: int, rows: int
) -> None:
    from mtplx_core.build import build_engine
    from mtplx_core.engine import Geometry, SchedulerMode
    from mtplx_core.forge.answers import collect_answers

    longest = max(len(prompt.tokens) for prompt in prompts) + max_tokens
    geometry = Geometry(decode_batch_max=rows, max_context_tokens=longest)
    engine = build_engine(SchedulerMode.AR_BATCH, loaded, geometry=geometry)
    with _bar("answers") as advance:
        collect_answers(engine, prompts, folder, max_tokens=max_tokens, on_progress=advance)
    engine.close()


def _prompts(loaded: LoadedModel, path: Path, temperatures: Sequence[float]) -> list[TrainingPrompt]:
    """The file's prompts as the chat template renders them."""
    from api.text.chat_template import load_template
    from mtplx_core.forge.answers import TrainingPrompt

    template = load_template(loaded.tokenizer_files)
    if template is None:
        raise click.UsageError(f"{loaded.name} has no chat template")
    tokenizer = _tokenizer(loaded)
    texts = _lines(path)
    if not texts:
        raise click.UsageError(f"no prompts in {path}")
    rendered = [template.render([{"role": "user", "content": text}]) for text in texts]
    return [
        TrainingPrompt(
            tuple(tokenizer.encode(text, add_special_tokens=False).ids), temperatures[place % len(temperatures)]
        )
        for place, text in enumerate(rendered)
    ]


def _phrases(loaded: LoadedModel, path: Path | None) -> list[tuple[int, ...]]:
    """Topics as token ids, the ways they may stand in a sentence."""
    if path is None:
        return []
    tokenizer = _tokenizer(loaded)
    phrases = set()
    for topic in map(str.strip, _lines(path)):
        for form in (topic, topic[0].upper() + topic[1:]):
            for written in (form, f" {form}", f" {form}s"):
                phrases.add(tuple(tokenizer.encode(written, add_special_tokens=False).ids))
    return sorted(phrases)


def _lines(path: Path) -> list[str]:
    """What a text file holds in lines that are not blank. Raises: click.UsageError."""
    from api.bulk.lines import EncodingError, read_lines, text_of

    try:
        with path.open("rb") as file:
            return [text_of(line.data, line=line.number) for line in read_lines(file)]
    except EncodingError as error:
        raise click.UsageError(f"{path}: {error}") from error


def _tokenizer(loaded: LoadedModel) -> Tokenizer:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(loaded.tokenizer_files["tokenizer.json"].decode())


def _copy(head: Path, target: Path) -> None:
    """Take over a verified head, its report and its curve."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(head.iterdir()):
        (target / file.name).write_bytes(file.read_bytes())


@contextmanager
def _bar(what: str, *, extra: str = "") -> Iterator[Any]:
    """A progress bar, as a function of (done, total, note)."""
    columns = [TextColumn(f"mtplx: {what}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, *([TextColumn(extra)] if extra else []), console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=None, note="")
        yield lambda done, total, note="": progress.update(task, completed=done, total=total, note=note)
