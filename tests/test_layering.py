"""House rules that can be read off the source: who imports whom, docstrings, sizes. Runs on no engine."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("api", "broker", "console", "mtplx_core", "workers")
TOP_LEVEL = ("mtplx",)

FORBIDDEN = {
    "mtplx_core": {"api", "broker", "workers", "redis", "rq", "litestar", "uvicorn", "msgspec", "click"},
    "broker": {"api", "workers", "mtplx_core", "mlx", "mlx_lm", "transformers", "litestar", "uvicorn", "click"},
    "workers": {"api", "litestar", "uvicorn", "click"},
    "api": {"workers", "mtplx_core", "mlx", "mlx_lm", "transformers", "click"},
    "console": {"mlx", "mlx_lm", "transformers", "litestar"},
}
"""What a room must not import; only the command line may know the console."""
COMMAND_LINE = {"console", *TOP_LEVEL}

ENVIRONMENT_READERS = {
    "mtplx.py",
    "console/commands/forge.py",
    "console/commands/offline.py",
    "mtplx_core/models/pip_download.py",
}
"""The commands, and what hands it on to pip."""

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
PARAMETERS_MAX = 7

SOURCES = sorted(
    itertools.chain(
        *((ROOT / room).rglob("*.py") for room in (*ROOMS, "tests", "benchmarks", "harness")),
        (ROOT / f"{name}.py" for name in TOP_LEVEL),
    )
)
PRODUCT = [path for path in SOURCES if path.relative_to(ROOT).parts[0] not in {"tests", "benchmarks", "harness"}]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that a reader sees the room"
            yield node.module or ""


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_only_what_it_may(room: str) -> None:
    forbidden = FORBIDDEN[room] | (COMMAND_LINE if room != "console" else set())

    offences = [
        f"{named(path)} imports {name}"
        for path in (ROOT / room).rglob("*.py")
        for name in imports(parse(path))
        if name.partition(".")[0] in forbidden
    ]

    assert offences == []


def test_mlx_is_imported_by_the_engine_room_and_the_workers_alone() -> None:
    offences = [
        named(path)
        for path in PRODUCT
        if path.relative_to(ROOT).parts[0] not in {"mtplx_core", "workers"}
        and any(name.partition(".")[0] in {"mlx", "mlx_lm"} for name in imports(parse(path)))
    ]

    assert offences == []


def test_module_opens_with_a_docstring() -> None:
    assert [named(path) for path in SOURCES if path.read_text() and not ast.get_docstring(parse(path))] == []


def test_module_is_short_enough_to_hold_one_idea() -> None:
    lengths = {named(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}

    assert {path: lines for path, lines in lengths.items() if lines > FILE_LINES_MAX} == {}


def test_function_is_short_enough_to_read() -> None:
    too_long = {
        f"{named(path)}:{node.name}": length
        for path in PRODUCT
        for node in functions(parse(path))
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    }

    assert too_long == {}


def test_function_takes_an_object_rather_than_many_parameters() -> None:
    too_many = {
        f"{named(path)}:{node.name}": count
        for path in PRODUCT
        for node in functions(parse(path))
        if (count := len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)) > PARAMETERS_MAX + 1
    }

    assert too_many == {}


def test_environment_is_read_by_the_command_line_alone() -> None:
    offences = [
        named(path)
        for path in PRODUCT
        if named(path) not in ENVIRONMENT_READERS
        and any(
            isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "environb"}
            and isinstance(node.value, ast.Name) and node.value.id == "os"
            for node in ast.walk(parse(path))
        )
    ]  # fmt: skip

    assert offences == []


def test_nothing_is_printed_or_pickled() -> None:
    offences = [
        f"{named(path)}:{node.lineno}"
        for path in PRODUCT
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Name)
        and node.id == "print"
        or isinstance(node, ast.Import)
        and any(alias.name in {"pickle", "marshal", "shelve"} for alias in node.names)
    ]

    assert offences == []


def test_no_module_is_a_drawer_for_everything() -> None:
    drawers = {"utils", "util", "helpers", "helper", "misc", "common"}

    assert [
        named(path) for path in SOURCES if path.stem in drawers or drawers & set(path.relative_to(ROOT).parts)
    ] == []


def test_import_stand_ins_do_not_exist() -> None:
    offences = [
        f"{named(path)}:{node.lineno}"
        for path in PRODUCT
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Try)
        and any(isinstance(step, ast.Import | ast.ImportFrom) for step in node.body)
        and any(
            "ImportError" in ast.dump(handler) or "ModuleNotFound" in ast.dump(handler) for handler in node.handlers
        )
    ]

    assert offences == []
