"""What an installed package needs beside its Python files is installed with it."""

from __future__ import annotations

import tomllib
from pathlib import Path

from mtplx_core.mtp.assemble import SHIPPED

ROOT = Path(__file__).resolve().parents[1]


def test_every_file_of_a_package_that_is_not_python_is_package_data() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = [pattern.removesuffix("*") for pattern in tools["packages"]["find"]["include"]]

    beside = {
        path.relative_to(ROOT)
        for package in packages
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    installed = {
        path.relative_to(ROOT)
        for package, patterns in tools["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package).glob(pattern)
        if path.is_file()
    }

    assert beside == installed
    assert any(path.is_relative_to(SHIPPED.relative_to(ROOT)) for path in installed)
