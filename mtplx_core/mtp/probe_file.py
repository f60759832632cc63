"""Keeps what the start-up probe measured in a file per machine, model and geometry, for this version of MLX."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from mtplx_core.engine import Geometry

logger = logging.getLogger(__name__)

_FORMAT = 2


class KeptProbe(Protocol):
    """The parts of a probe that are kept."""

    @property
    def seconds(self) -> dict[tuple[int, int], float]: ...

    @property
    def chunk_tokens(self) -> int: ...

    @property
    def draft_shares(self) -> Mapping[str, Mapping[int, float]]: ...

    @property
    def key_s(self) -> tuple[float, float]: ...

    @property
    def is_whole(self) -> bool: ...

    @property
    def spread(self) -> float: ...

    @property
    def made_s(self) -> float: ...


def probe_file(folder: Path, identity: str, geometry: Geometry) -> Path:
    """Where the probe of this machine, model and geometry is kept."""
    info: Any = mx.device_info()
    machine = str(info.get("device_name", info.get("architecture", platform.machine()))) + platform.node()
    bounds = f"b{geometry.decode_batch_max}-t{geometry.depth + 1}-c{geometry.prefill_chunk_tokens}"
    name = "".join(
        letter if letter.isalnum() or letter in "-@." else "_" for letter in f"{identity}-{machine}-{bounds}"
    )
    return folder / f"{name}.json"


def read_probe(path: Path) -> dict[str, Any] | None:
    """The parts of the probe that is kept; None where there is none, or none that this version of MLX made."""
    try:
        kept = json.loads(path.read_text())
        if (kept.get("format"), kept.get("mlx")) != (_FORMAT, version("mlx")):
            logger.info("probe file %s is of another version and is measured anew", path)
            return None
        return _parsed(kept)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        logger.warning("probe file %s cannot be read and is measured anew", path)
        return None


def write_probe(path: Path, probe: KeptProbe) -> None:
    """Keep a probe in the place of an earlier one."""
    entries = [[rows, depth, cost] for (rows, depth), cost in sorted(probe.seconds.items())]
    content = {
        "format": _FORMAT,
        "mlx": version("mlx"),
        "made_s": probe.made_s,
        "is_whole": probe.is_whole,
        "spread": probe.spread,
        "seconds": entries,
        "key_s": probe.key_s,
        "chunk_tokens": probe.chunk_tokens,
        "draft_shares": {name: sorted(by_rows.items()) for name, by_rows in probe.draft_shares.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(content))
    unfinished.replace(path)


def _parsed(kept: Mapping[str, Any]) -> dict[str, Any] | None:
    seconds = {(int(rows), int(depth)): float(cost) for rows, depth, cost in kept["seconds"]}
    plain, per_draft = kept["key_s"]
    if (1, 0) not in seconds:
        return None
    shares = {
        str(name): {int(rows): float(share) for rows, share in by_rows}
        for name, by_rows in kept["draft_shares"].items()
    }
    return {
        "seconds": seconds,
        "chunk_tokens": int(kept["chunk_tokens"]),
        "draft_shares": shares,
        "key_s": (float(plain), float(per_draft)),
        "is_whole": bool(kept["is_whole"]),
        "spread": float(kept["spread"]),
        "made_s": float(kept["made_s"]),
    }
