"""The `mtplx` command itself: errors, keys, and that it stays light. Runs on no engine."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import click.testing
import pytest

from api.auth import load_keys
from console.commands.keys import run_key
from console.keep_awake import keep_awake
from console.settings import ConfigError, options
from console.supervisor import EXIT_CONFIG
from mtplx import cli
from tests.console.processes import clean_environ

ROOT = Path(__file__).resolve().parents[2]


def variables() -> list[str]:
    return [name for name in os.environ if name.startswith("MTPLX_")]


def all_commands(group: click.Group) -> Iterator[click.Command]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield command
        if isinstance(command, click.Group):
            yield from all_commands(command)


def python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=clean_environ(), check=True)


def mtplx(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environ = clean_environ() | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mtplx", *words]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)


@pytest.mark.parametrize("name", list(cli.commands))
def test_command_has_help_that_says_what_it_does(name: str) -> None:
    result = click.testing.CliRunner().invoke(cli, [name, "--help"])

    assert result.exit_code == 0
    assert cli.commands[name].help


@pytest.mark.parametrize("name", ["up", "api", "former", "worker"])
def test_command_refuses_a_bad_value(name: str) -> None:
    result = click.testing.CliRunner(env=dict.fromkeys(variables())).invoke(cli, [name, "--lease-s", "never"])

    assert isinstance(result.exception, ConfigError)


def test_command_says_in_one_line_what_is_refused(tmp_path: Path) -> None:
    result = mtplx("worker", "--lease-s", "never", folder=tmp_path)

    assert result.returncode == EXIT_CONFIG
    assert result.stderr == ("mtplx: flag --lease-s: lease_s = 'never' is refused; allowed: a number from 0.5 to 600\n")


def test_command_refuses_an_unknown_key_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "mtplx.toml").write_text("prot = 9000\n")

    result = mtplx("status", folder=tmp_path)

    assert result.returncode == EXIT_CONFIG
    assert "did you mean port?" in result.stderr


def test_command_says_in_one_line_that_redis_cannot_be_reached(tmp_path: Path) -> None:
    result = mtplx("status", "--redis", f"unix://{tmp_path}/nothing.sock", folder=tmp_path)

    assert result.returncode == 1
    assert result.stderr.startswith("mtplx: Redis cannot be used")
    assert "Traceback" not in result.stderr


def test_command_says_in_one_line_that_a_url_cannot_be_read(tmp_path: Path) -> None:
    result = mtplx("former", "--redis", "http://queue", folder=tmp_path)

    assert result.returncode == EXIT_CONFIG
    assert "redis://, rediss:// or unix://" in result.stderr


def test_every_option_is_a_flag_of_some_command() -> None:
    flags = {flag for command in all_commands(cli) for each in command.params for flag in each.opts}

    assert {option.flag for option in options().values()} <= flags


@pytest.mark.parametrize(
    "rooms",
    [
        pytest.param("mtplx", id="command line"),
        pytest.param("console.daemons, broker.former.daemon", id="former"),
        pytest.param("console.daemons, api.serve, api.app", id="api"),
        pytest.param(
            "console.commands.up, console.commands.status, console.commands.doctor, console.commands.fetch",
            id="console",
        ),
    ],
)
def test_command_without_a_model_never_loads_mlx(rooms: str) -> None:
    python(f"import sys; import {rooms}; sys.exit(any(name.partition('.')[0] == 'mlx' for name in sys.modules))")


def test_command_line_imports_no_room_before_a_command_runs() -> None:
    rooms = {"api", "broker", "workers", "mtplx_core", "redis", "litestar", "rich"}
    python(f"import sys; import mtplx; sys.exit(bool({rooms!r} & {{name.partition('.')[0] for name in sys.modules}}))")


def test_key_is_shown_once_and_kept_as_a_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"

    run_key("alice", keys_file=path)

    key = capsys.readouterr().out.strip()
    assert key not in path.read_text()
    assert load_keys(path).payer(f"Bearer {key}").key_id == "alice"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_key_is_added_to_those_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"

    for name in ("alice", "bob"):
        run_key(name, keys_file=path)

    keys = capsys.readouterr().out.split()
    assert [load_keys(path).payer(f"Bearer {key}").key_id for key in keys] == ["alice", "bob"]


@pytest.mark.parametrize("name", ["alice", "no spaces", ""])
def test_key_is_refused_when_its_name_is_taken_or_cannot_be_one(tmp_path: Path, name: str) -> None:
    path = tmp_path / "keys.toml"
    run_key("alice", keys_file=path)

    with pytest.raises(ConfigError, match="allowed:"):
        run_key(name, keys_file=path)


def test_worker_keeps_a_mac_awake_for_as_long_as_it_lives() -> None:
    started: list[object] = []

    keep_awake(platform="darwin", start=started.append)

    assert started == [["/usr/bin/caffeinate", "-i", "-s", "-w", str(os.getpid())]]


def test_worker_starts_nothing_beside_itself_on_linux() -> None:
    started: list[object] = []

    keep_awake(platform="linux", start=started.append)

    assert started == []
