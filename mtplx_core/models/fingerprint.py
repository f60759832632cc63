"""Hashes a model folder: weights, config and tokenizer. Weight hashes are remembered by size and time."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

_CACHE_FILE = "weight_hashes.json"
_NOT_BEHAVIOUR = ("_name_or_path", "transformers_version")


def model_digest(path: Path, *, tokenizer_files: Mapping[str, bytes], cache_dir: Path | None) -> str:
    """Hex digest of what decides the model's output: equal digests mean equal weights, config and tokenizer."""
    digest = hashlib.sha256()
    for name, file_hash in sorted(_weight_hashes(path, cache_dir).items()):
        digest.update(f"{name} {file_hash}\n".encode())
    digest.update(_config_hash(path / "config.json"))
    for name, content in sorted(tokenizer_files.items()):
        digest.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()


def _config_hash(path: Path) -> bytes:
    config = json.loads(path.read_bytes())
    kept = {key: value for key, value in config.items() if key not in _NOT_BEHAVIOUR}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).digest()


def _weight_hashes(path: Path, cache_dir: Path | None) -> dict[str, str]:
    known = _read_cache(cache_dir)
    hashes, missing = {}, {}
    for file in sorted(path.glob("*.safetensors")):
        key = _cache_key(file)
        value = known.get(key)
        if value is None:
            value = missing[key] = _file_hash(file)
        hashes[file.name] = value
    if missing and cache_dir is not None:
        _write_cache(cache_dir, {**_read_cache(cache_dir), **missing})
    return hashes


def _cache_key(file: Path) -> str:
    status = file.stat()
    return f"{file.resolve()}:{status.st_size}:{status.st_mtime_ns}"


def _file_hash(file: Path) -> str:
    logger.info("hashing %s once", file)
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read_cache(cache_dir: Path | None) -> dict[str, str]:
    if cache_dir is None:
        return {}
    try:
        entries = json.loads((cache_dir / _CACHE_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return {str(key): str(value) for key, value in entries.items()} if isinstance(entries, dict) else {}


def _write_cache(cache_dir: Path, entries: Mapping[str, str]) -> None:
    # Whole or not at all: two workers may start at once, and losing one entry only costs hashing again.
    cache_dir.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{_CACHE_FILE}-", dir=cache_dir)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(dict(entries), file, indent=1)
    os.replace(temporary, cache_dir / _CACHE_FILE)
