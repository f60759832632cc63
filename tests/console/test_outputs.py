"""What cannot be written, and files with byte-order marks: one sentence before any work. Runs on no engine."""

from __future__ import annotations

import codecs
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from api.auth import load_keys
from console.commands.forge import forge
from console.commands.keys import run_key
from console.commands.offline import batch, run
from console.options import ConfigError
from console.outputs import folder_problem
from console.settings import FILE_NAME, load

NOWHERE = "redis://127.0.0.1:1"
"""No server; asking it would be work."""
ORDINARY_USER = 65534


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "p.jsonl"
    path.write_text('"one"\n')
    return path


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "file").touch()
    return {"missing": tmp_path / "missing" / "x", "no folder": tmp_path / "file" / "x"}


@contextmanager
def without_right(folder: str) -> Iterator[None]:
    """Inside, this process may not write into a folder of its own; the superuser may anywhere, so it is another."""
    before = os.geteuid()
    os.chmod(folder, 0o500)
    os.seteuid(before or ORDINARY_USER)
    try:
        yield
    finally:
        os.seteuid(before)
        os.chmod(folder, 0o700)


def said(result: Result) -> str:
    """The one sentence behind the usage."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return result.output.strip().splitlines()[-1]


@pytest.mark.parametrize("kind", ["missing", "no folder"])
def test_output_of_a_run_that_cannot_be_there_is_refused(prompts: Path, places: dict[str, Path], kind: str) -> None:
    done = CliRunner().invoke(run, [str(prompts), "-o", str(places[kind]), "--redis", NOWHERE])

    assert "'-o'" in said(done)
    assert "folder" in said(done)


@pytest.mark.parametrize("flag", ["-o", "--errors"])
@pytest.mark.parametrize("kind", ["missing", "no folder"])
def test_output_of_a_batch_that_cannot_be_there_is_refused(
    tmp_path: Path, places: dict[str, Path], kind: str, flag: str
) -> None:
    paths = {"-o": str(tmp_path / "out"), flag: str(places[kind])}
    words = [word for pair in paths.items() for word in pair]

    done = CliRunner().invoke(batch, ["fetch", "batch-1", *words, "--server", "http://127.0.0.1:1"])

    assert "folder" in said(done)


def test_folder_of_the_forge_that_cannot_be_made_is_refused(prompts: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(forge, ["collect", "--prompts", str(prompts), "--into", str(prompts / "states")])

    assert "is no folder" in said(done)
    assert not (tmp_path / "states").exists()


@pytest.mark.parametrize("kind", ["missing", "no folder"])
def test_keys_file_that_cannot_be_there_is_refused(places: dict[str, Path], kind: str) -> None:
    with pytest.raises(ConfigError, match="keys_file .* folder"):
        run_key("me", keys_file=places[kind])


def test_folder_that_cannot_be_written_to_is_said_to_be_one() -> None:
    with tempfile.TemporaryDirectory() as folder, without_right(folder):
        assert "cannot be written to" in folder_problem(Path(folder))


def test_output_over_the_prompts_is_refused(prompts: Path) -> None:
    done = CliRunner().invoke(run, [str(prompts), "-o", str(prompts), "--overwrite", "--redis", NOWHERE])

    assert done.exit_code == 1
    assert "it holds the prompts" in done.output
    assert prompts.read_text() == '"one"\n'


@pytest.mark.parametrize("data", [b"", b"\n \r\n", codecs.BOM_UTF8], ids=["empty", "blank", "only a mark"])
def test_run_without_rows_warns_and_has_a_status_of_its_own(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "p.jsonl").write_bytes(data)

    done = CliRunner().invoke(run, [str(tmp_path / "p.jsonl"), "-o", str(tmp_path / "a"), "--redis", NOWHERE])

    assert done.exit_code == 3
    assert "has no rows" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--encoding", "latin-99"), ("--encoding", "base64"), ("--separator", "ab"), ("--format", "xls")],
)
def test_reading_that_is_unknown_is_refused(prompts: Path, tmp_path: Path, flag: str, value: str) -> None:
    done = CliRunner().invoke(run, [str(prompts), "-o", str(tmp_path / "a"), flag, value, "--redis", NOWHERE])

    assert flag in said(done)


def test_settings_and_keys_are_read_behind_a_mark(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text('model = "m"\n', encoding="utf-8-sig")
    (tmp_path / "keys.toml").write_text(f'[keys.me]\nhash = "sha256:{"0" * 64}"\n', encoding="utf-8-sig")

    assert load({}, environ={}, directory=tmp_path).model == "m"
    assert not load_keys(tmp_path / "keys.toml").is_open
