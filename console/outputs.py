"""Whether what a command is to write can be written; asked before any work is done."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click


class NewFile(click.Path):
    """A flag's file, whose folder must be there."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path: Any = super().convert(value, param, ctx)
        if problem := folder_problem(path.parent):
            self.fail(f"{str(path)!r}: {problem}", param, ctx)
        return path


class NewFolder(click.Path):
    """A flag's folder, which is made where there is none."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        made: Any = super().convert(value, param, ctx)
        path = Path(made)
        nearest = next(each for each in (path.absolute(), *path.absolute().parents) if os.path.lexists(each))
        if problem := folder_problem(nearest):
            self.fail(f"{str(path)!r}: {problem}", param, ctx)
        return path


def folder_problem(folder: Path) -> str:
    """Why no file can be written into a folder; empty: one can."""
    if not os.path.lexists(folder):
        return f"there is no folder {str(folder)!r}; allowed: one that is there"
    if not os.path.isdir(folder):
        return f"{str(folder)!r} is no folder; allowed: a file in one"
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        return f"the folder {str(folder)!r} cannot be written to; allowed: one that can"
    return ""
