"""What is deployed with: Makefile, lock files, Dockerfile, docker-compose.yml, README tables. Runs on no engine.

No container is started: the files are read and held against what the command line and the packages really are.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from console.commands.up import STOP_MARGIN_S
from console.settings import PRESETS, Settings
from mtplx import cli

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = ("requirements.lock", "requirements-dev.lock")


def make(*words: str) -> str:
    reply = subprocess.run(["make", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    return reply.stdout


def copied() -> set[str]:
    """What the Dockerfile copies out of the project."""
    lines = re.findall(r"^COPY (.+)$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    return {source for line in lines for source in shlex.split(line)[:-1]}


def test_make_alone_lists_its_targets() -> None:
    assert all(f"make {target} " in make() for target in ("install", "up", "test", "check"))


def test_make_up_serves_on_the_port_it_is_given() -> None:
    assert ".venv/bin/mtplx up --port 9123" in make("-n", "up", "PORT=9123")


@pytest.mark.parametrize("name", LOCKS)
def test_lock_pins_every_package_by_hash_and_names_no_index(name: str) -> None:
    entries = (ROOT / name).read_text().replace("\\\n", " ").splitlines()

    assert entries
    assert all(re.match(r"[a-z0-9-]+(\[[a-z,-]+\])?==\S+( ; .+?)?\s+--hash=sha256:", entry) for entry in entries)
    assert not any(word in entry for entry in entries for word in ("://", "--index", "--find-links"))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("requirements.lock", PROJECT["project"]["dependencies"]),
        ("requirements-dev.lock", PROJECT["project"]["optional-dependencies"]["dev"]),
    ],
    ids=LOCKS,
)
def test_lock_has_every_declared_package(name: str, wanted: list[str]) -> None:
    locked = set(re.findall(r"^([a-z0-9-]+)", (ROOT / name).read_text(), flags=re.MULTILINE))

    assert {re.split(r"[^A-Za-z0-9_-]", each)[0] for each in wanted} <= locked


def test_locks_pin_the_same_versions() -> None:
    run, dev = (set(re.findall(r"^[a-z0-9-]+==.*$", (ROOT / name).read_text(), flags=re.MULTILINE)) for name in LOCKS)

    assert run <= dev


def test_image_holds_every_package_and_module() -> None:
    modules = {f"{name}.py" for name in PROJECT["tool"]["setuptools"]["py-modules"]}
    packages = {pattern.rstrip("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}

    assert modules | packages <= copied()
    assert all((ROOT / source).exists() for source in copied())


def test_image_is_built_from_what_dockerignore_lets_through() -> None:
    allowed = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), flags=re.MULTILINE)

    assert copied() == set(allowed)


def test_image_installs_the_pinned_packages_as_an_unprivileged_user() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()

    assert "--require-hashes -r requirements.lock" in dockerfile
    assert re.search(r"^USER mtplx$", dockerfile, flags=re.MULTILINE)


@pytest.mark.parametrize("service", ["former", "api", "batch-worker"])
def test_compose_runs_commands_that_exist_with_flags_that_exist(service: str) -> None:
    name, *words = COMPOSE["services"][service]["command"]

    context = cli.commands[name].make_context(name, list(words))

    assert context.command.name == service


def test_compose_redis_persists_every_write_and_never_evicts() -> None:
    command = COMPOSE["services"]["redis"]["command"]
    flags = dict(zip(command[1::2], command[2::2], strict=True))

    assert flags["--appendonly"] == "yes"
    assert flags["--appendfsync"] == "always"
    assert flags["--maxmemory-policy"] == "noeviction"
    assert flags["--hash-max-listpack-value"] == "1024"
    assert "--requirepass" in flags


def test_compose_keeps_the_queue_on_a_volume() -> None:
    assert "queue:/data" in COMPOSE["services"]["redis"]["volumes"]
    assert "queue" in COMPOSE["volumes"]


def test_compose_has_one_file_store_for_api_and_batch_worker() -> None:
    services = COMPOSE["services"]
    place = services["api"]["environment"]["MTPLX_FILE_STORE"]

    assert services["batch-worker"]["environment"]["MTPLX_FILE_STORE"] == place
    assert all(f"files:{place}" in services[name]["volumes"] for name in ("api", "batch-worker"))
    assert "files" in COMPOSE["volumes"]
    assert place in (ROOT / "Dockerfile").read_text()


@pytest.mark.parametrize(("service", "give_s"), [("api", Settings().drain_s), ("worker", Settings().grace_s)])
def test_compose_gives_a_daemon_the_time_it_gives_to_streams_and_rows(service: str, give_s: float) -> None:
    assert int(COMPOSE["services"][service]["stop_grace_period"].rstrip("s")) >= give_s + STOP_MARGIN_S


def test_compose_serves_nobody_without_a_key() -> None:
    assert COMPOSE["services"]["api"]["command"][-2:] == ["--keys-file", "/run/secrets/keys"]
    assert COMPOSE["services"]["api"]["secrets"] == ["keys"]


def test_compose_refuses_to_start_without_a_password() -> None:
    variables = set(re.findall(r"\$\{(.+?)\}", (ROOT / "docker-compose.yml").read_text()))

    assert variables == {"MTPLX_REDIS_PASSWORD:?set MTPLX_REDIS_PASSWORD"}


def test_readme_table_of_presets_is_the_table_of_the_code() -> None:
    rows = re.findall(
        r"^\| `(\w+)`.*?\| (\d+) \| (\d+) ms \| (\d+) \| ([\d.]+) \|$", (ROOT / "README.md").read_text(), re.M
    )

    assert {name: (int(rows), int(wait), int(chunk), float(share)) for name, rows, wait, chunk, share in rows} == {
        name: (each.decode_batch_max, each.batch_wait_ms, each.prefill_chunk_tokens, each.offline_share)
        for name, each in PRESETS.items()
    }


def test_readme_names_every_command() -> None:
    readme = (ROOT / "README.md").read_text()

    assert [name for name in cli.commands if f"`mtplx {name}" not in readme] == []


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
)
def test_page_links_only_to_files_that_exist(page: str) -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / page).read_text())

    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []
