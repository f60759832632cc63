"""`mtplx key`: makes an API key. The key is shown once; only its hash is kept."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click

from api.auth import hash_key, new_key
from console.options import ConfigError
from console.outputs import folder_problem

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def run_key(name: str, *, keys_file: Path | None) -> None:
    """Make a key, add its hash to the keys file if one is named, and print it.

    Raises:
        ConfigError: the name cannot be used, or is taken.
    """
    if not NAME.fullmatch(name):
        raise ConfigError("name", name, "allowed: up to 64 letters, digits, _ and -", source="key")
    if keys_file is not None and (problem := folder_problem(keys_file.parent)):
        raise ConfigError("keys_file", str(keys_file), problem, source="key")
    key = new_key()
    table = f'[keys.{name}]\nhash = "{hash_key(key)}"\n'
    if keys_file is None:
        click.echo(f"# add this to the file that --keys-file names:\n{table}", err=True)
    else:
        try:
            _append(keys_file, name, table)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("keys_file", str(keys_file), f"{error}; allowed: a TOML file", source="key") from error
    click.echo(key)


def _append(path: Path, name: str, table: str) -> None:
    before = path.read_text(encoding="utf-8-sig") if path.exists() else ""
    if f"[keys.{name}]" in before:
        raise ConfigError("name", name, f"taken in {path}; allowed: another name", source="key")
    gap = "" if not before or before.endswith("\n\n") else "\n"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w", encoding="utf-8") as file:
        file.write(gap + table)
