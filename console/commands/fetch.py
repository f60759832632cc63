"""`mtplx fetch`: brings the default model into the cache, with a progress bar. The engine room does the work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

from console.settings import Settings
from mtplx_core.models.fetch import FetchProgress, default_cache_dir, fetch_default_model, is_fetched


def run_fetch(settings: Settings, environ: Mapping[str, str], *, quiet: bool = False) -> None:
    """Fetch the default model unless it is there; `quiet` says nothing when it is.

    Raises:
        ModelLoadError: it cannot be had.
    """
    cache_dir = cache_dir_of(settings, environ)
    if quiet and is_fetched(cache_dir):
        return
    # Converting uses MLX, which must find a fast matrix product already loaded.
    from mtplx_core.blas import load_blas

    load_blas()
    with _bar() as progress:
        folder = fetch_default_model(cache_dir, on_progress=_Stages(progress))
    click.echo(f"mtplx: model at {folder}", err=True)


def cache_dir_of(settings: Settings, environ: Mapping[str, str]) -> Path:
    """The cache directory: the option's, or the user's default one."""
    return settings.cache_dir or default_cache_dir(environ)


def _bar() -> Progress:
    columns = (TextColumn("mtplx: {task.description:<22}"), BarColumn(), TaskProgressColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


class _Stages:
    """One bar per stage of a fetch, in the order in which they report."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[str, TaskID] = {}

    def __call__(self, news: FetchProgress) -> None:
        if news.stage not in self._bars:
            self._bars[news.stage] = self._progress.add_task(news.stage)
        self._progress.update(self._bars[news.stage], completed=news.done, total=news.total or None)
