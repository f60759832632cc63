"""`mtplx run`: answers a file of prompts through the queue, with a bar, and can be broken off and taken up again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from api.bulk.output import BulkOutput
from api.bulk.rows import BulkRow, RowRecipe, Source, count_rows, is_table, read_rows
from api.bulk.run import Bulk, BulkCounts
from api.calls.client import TextClient
from api.errors import ApiConfigError

EXIT_FAILED, EXIT_NO_ROWS, EXIT_BROKEN_OFF = 1, 3, 130


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What was asked for on the command line."""

    prompts: Path
    output: Path
    model: str | None
    column: str | None
    template: str | None
    system: str | None
    is_raw: bool
    keeps_order: bool
    overwrite: bool
    in_flight: int
    fields: Mapping[str, Any]
    source: Source = Source()

    def recipe(self, model: str) -> RowRecipe:
        return RowRecipe(model, self.column, self.template, self.is_raw, self.system, self.fields, self.source)

    def job(self, model: str) -> dict[str, Any]:
        """What must be the same for a run to be taken up again."""
        return {
            "prompts": str(self.prompts.resolve()),
            "bytes": self.prompts.stat().st_size,
            "model": model,
            "column": self.column,
            "template": self.template,
            "system": self.system,
            "raw": self.is_raw,
            "fields": dict(self.fields),
            **{name: said for name, said in asdict(self.source).items() if said},
        }


def run_run(redis_url: str, options: RunOptions) -> int:
    """The exit status: 0, 1 when a row has no answer, 3 when there are no rows, 130 when it was broken off.

    Raises:
        ApiError: nobody serves the model.
        ApiConfigError: the file cannot be read, or the output is another run's.
        OSError: the output cannot be written.
        BrokerError: Redis cannot be used.
    """
    if options.output.exists() and options.output.samefile(options.prompts):
        raise ApiConfigError(f"output = {str(options.output)!r}: it holds the prompts; allowed: another name")
    total = count_rows(options.prompts, options.source)
    if not total:
        click.echo(f"mtplx: {options.prompts} has no rows; nothing was asked or written", err=True)
        return EXIT_NO_ROWS
    return asyncio.run(_run(redis_url, options, total=total))


async def _run(redis_url: str, options: RunOptions, *, total: int) -> int:
    async with await TextClient.open(redis_url) as text:
        model = options.model or await _only_model(text)
        recipe = options.recipe(model)
        rows = _checked(options.prompts, read_rows(options.prompts, recipe), recipe)
        with BulkOutput.begin(options.output, options.job(model), overwrite=options.overwrite) as output, _bar() as bar:
            view = _View(bar, total=total, done=len(output.done))
            bulk = Bulk(text, output, options.in_flight, options.keeps_order, view.show)
            is_whole = await until_broken_off(bulk, rows)
            if is_whole:
                output.complete()
    return _report(output, bulk.counts, is_whole=is_whole, path=options.output)


async def until_broken_off(bulk: Bulk, rows: Iterator[BulkRow]) -> bool:
    """Return whether all rows were answered before Ctrl-C. Raises: OSError when the output cannot be written."""
    running = asyncio.create_task(bulk.run(rows), name="bulk")
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, running.cancel)
    try:
        await asyncio.wait({running})
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    if running.cancelled():
        await bulk.abandon()
        return False
    try:
        await running
    except ExceptionGroup as errors:
        if (unwritten := errors.subgroup(OSError)) is None:
            raise
        with contextlib.suppress(OSError):  # then the next run finds what was in flight, and takes it
            await bulk.abandon()
        raise OSError(f"the output cannot be written: {unwritten.exceptions[0]}") from errors
    return True


async def _only_model(text: TextClient) -> str:
    models = [model.id for model in await text.catalog.models() if model.profiles]
    if len(models) != 1:
        known = ", ".join(models) or "none; start one with mtplx up"
        raise click.UsageError(f"say which model with --model; served now: {known}")
    return models[0]


def _checked(path: Path, rows: Iterator[BulkRow], recipe: RowRecipe) -> Iterator[BulkRow]:
    """The rows; a table whose first row is wrong is wrong throughout."""
    first = next(rows, None)
    if first is None:
        return iter(())
    if first.problem and is_table(path, recipe.source):
        raise click.UsageError(f"{path}: {first.problem}")
    return itertools.chain([first], rows)


def _report(output: BulkOutput, counts: BulkCounts, *, is_whole: bool, path: Path) -> int:
    done = len(output.done)
    if not is_whole:
        click.echo(f"mtplx: broken off after {done} rows; the same command goes on from there", err=True)
        return EXIT_BROKEN_OFF
    failed = f", {output.failed} of them with an error" if output.failed else ""
    click.echo(f"mtplx: {done} rows in {path}{failed}; {counts.completion_tokens} tokens in this run", err=True)
    return EXIT_FAILED if output.failed else 0


def _bar() -> Progress:
    columns = (
        TextColumn("mtplx:"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[facts]}"),
    )
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


class _View:
    """The bar, as counts change."""

    def __init__(self, bar: Progress, *, total: int, done: int) -> None:
        self._bar = bar
        self._done = done
        self._began_s = time.monotonic()
        self._task = bar.add_task("rows", total=total, completed=done, facts="")

    def show(self, counts: BulkCounts) -> None:
        seconds = max(time.monotonic() - self._began_s, 1e-6)
        facts = [f"{counts.completion_tokens / seconds:.0f} tokens/s"]
        if counts.acceptance is not None:
            facts.append(f"{counts.acceptance:.0%} of drafts accepted")
        if counts.failed:
            facts.append(f"{counts.failed} failed")
        if counts.waits_for:
            facts.append(f"waits: {counts.waits_for}")
        self._bar.update(self._task, completed=self._done + counts.rows, facts="  ".join(facts))
