"""Measures what forwards cost here: the table the depth policy starts from and the prefill chunk that fits a cycle.

At most `budget_s` are spent at start-up; the outcome is kept in a file per machine and model. The clock is given.
"""

from __future__ import annotations

import json
import logging
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from mtplx_core.cost_table import CostTable, assumed_costs
from mtplx_core.device_batch import new_head_drafter, new_trunk_cache
from mtplx_core.engine import Geometry
from mtplx_core.heads.base import Head
from mtplx_core.ragged_cache import cache_arrays, plain_caches
from mtplx_core.trunk import Trunk

logger = logging.getLogger(__name__)

ATTENDED_TOKENS = 256
"""Context length the table is measured at."""
_REPEATS = 3
_REPEATS_OF_SHORT = 12
_SHORT_S = 0.05
"""Of all repetitions."""
_CHUNKS = (512, 256, 128, 64, 32)
_FOR_CHUNKS = 0.25
"""Of the budget."""
_CHUNK_CYCLES = 2.0
"""A prefill chunk may cost this many cycles of the full batch."""
_EVERY_DEPTH_TO = 3
"""Beyond it every other depth is measured."""
_TILE_EDGES = (4, 5, 8, 16, 32, 33, 64)
"""Row counts at which matrix kernels change; only a GPU has such edges."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What was measured."""

    seconds: dict[tuple[int, int], float]
    """Trunk forward by (rows, depth)."""
    chunk_tokens: int
    draft_shares: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """By head, what a draft of it costs beside a plain step of so many rows."""

    def cost_table(self, geometry: Geometry) -> CostTable:
        """Costs for a depth policy; where no draft was measured, they grow as assumed."""
        measured = {(rows, depth): cost for (rows, depth), cost in self.seconds.items() if depth <= geometry.depth}
        if not any(depth for _, depth in measured):
            assumed = assumed_costs(rows=geometry.decode_batch_max, depth=geometry.depth)
            measured[1, geometry.depth] = measured[1, 0] * assumed.cost(1, geometry.depth) / assumed.cost(1, 0)
        return CostTable(measured)

    def share_table(self, head: Head) -> CostTable:
        """What a draft of this head costs in plain steps, by rows."""
        return CostTable({(rows, 0): share for rows, share in self.draft_shares[head.name].items()}, has_mood=False)


def probe_forwards(trunk: Trunk, geometry: Geometry, *, clock: Callable[[], float], budget_s: float = 10.0) -> Probe:
    """Measure until done or out of budget, most telling points first."""
    deadline = clock() + budget_s
    seconds: dict[tuple[int, int], float] = {}
    for rows, depth in _grid(geometry):
        started = clock()
        seconds[rows, depth] = time_forward(trunk, rows=rows, positions=depth + 1, clock=clock)
        # A wider point may take twice as long; the rest is for the prefill chunk.
        if clock() + 2 * (clock() - started) > deadline - _FOR_CHUNKS * budget_s:
            logger.info("probe stopped at %d points", len(seconds))
            break
    widest = max(rows for rows, depth in seconds if depth == 0)
    limit = _CHUNK_CYCLES * seconds[widest, 0]
    return Probe(seconds, _fitting_chunk(trunk, geometry, limit_s=limit, deadline=deadline, clock=clock))


def time_forward(trunk: Trunk, *, rows: int, positions: int, clock: Callable[[], float]) -> float:
    """Seconds of one forward with logits at a usual length, the median of a few."""
    return _usual(lambda n: forward_times(trunk, [ATTENDED_TOKENS] * rows, positions=positions, clock=clock, repeats=n))


def draft_shares(
    trunk: Trunk, head: Head, *, plain_s: Mapping[int, float], clock: Callable[[], float]
) -> dict[int, float]:
    """What the first draft of a cycle costs, by rows, as a share of a plain step of as many.

    Args:
        plain_s: seconds of such steps by rows.
    """

    def times(rows: int, repeats: int) -> list[float]:
        return _draft_times(trunk, head, rows, clock=clock, repeats=repeats)

    return {rows: _usual(partial(times, rows)) / seconds for rows, seconds in plain_s.items()}


def _usual(times: Callable[[int], list[float]]) -> float:
    """The median of a few repetitions, of more where they are so short that little disturbs them much."""
    first = times(_REPEATS)
    return statistics.median(first + times(_REPEATS_OF_SHORT) if sum(first) < _SHORT_S else first)


def _draft_times(trunk: Trunk, head: Head, rows: int, *, clock: Callable[[], float], repeats: int) -> list[float]:
    """Of a cycle's first draft, with the pair that the cycle before left behind."""
    drafter = new_head_drafter(trunk, head, max_depth=1)
    longest = ATTENDED_TOKENS + repeats + 1
    drafter.cache.reserve(rows, longest + 2)
    probe = plain_caches(head.cached_layers)
    head(
        mx.zeros((1, ATTENDED_TOKENS, trunk.hidden_size), trunk.dtype), mx.zeros((1, ATTENDED_TOKENS), mx.int32), probe
    )
    hidden, tokens = mx.zeros((rows, 1, trunk.hidden_size), trunk.dtype), mx.zeros((rows, 1), mx.int32)
    for slot in range(rows):
        drafter.seat(slot, probe, hidden[:1], 0)
    times = []
    for _ in range(repeats + 1):
        started = clock()
        drafts = drafter.draft(lambda logits, _: mx.argmax(logits[:, 0], axis=-1), 1, longest=longest, parked=None)
        drafter.commit(hidden, tokens, mx.ones((rows,), mx.int32), most=1)
        mx.eval(drafts, drafter.pending)
        times.append(clock() - started)
    return times[1:]


def forward_times(
    trunk: Trunk, lengths: Sequence[int], *, positions: int, clock: Callable[[], float], repeats: int
) -> list[float]:
    """Seconds of each of some forwards with logits and with what they leave in the caches, after one to warm up.

    Args:
        lengths: tokens each row has once `positions` of them are fed.
    """
    rows, longest = len(lengths), max(lengths)
    cache = new_trunk_cache(trunk, max_positions=positions)
    cache.reserve(rows, longest)
    tokens = mx.zeros((rows, positions), mx.int32)
    offset = mx.array(list(lengths), mx.int32) - positions
    times = []
    for _ in range(repeats + 1):
        started = clock()
        cache.begin(offset, positions, longest=longest, lengths=lengths)
        logits = trunk.logits(trunk.hidden(tokens, cache.layers))
        cache.commit(mx.ones((rows,), mx.int32), known=[1] * rows)
        mx.eval(logits, [layer.arrays for layer in cache.recurrent])
        times.append(clock() - started)
    return times[1:]


def load_or_probe(
    trunk: Trunk,
    geometry: Geometry,
    *,
    identity: str,
    folder: Path | None,
    clock: Callable[[], float],
    head: Head | None = None,
    is_renewed: bool = False,
) -> Probe:
    """The probe kept for this machine, model and geometry, or a new one, which is then kept.

    Args:
        identity: the model's.
        folder: where probes are kept; None measures anew and keeps nothing.
        head: whose drafts are measured as well.
        is_renewed: measure anew although one is kept.
    """
    path = folder / f"{_file_name(identity, geometry)}.json" if folder is not None else None
    kept = _read(path) if path is not None and not is_renewed else None
    probe = kept or probe_forwards(trunk, geometry, clock=clock)
    if head is not None and head.name not in probe.draft_shares:
        plain_s = {
            rows: probe.seconds[rows, 0] for rows in (1, geometry.decode_batch_max) if (rows, 0) in probe.seconds
        }
        shares = draft_shares(trunk, head, plain_s=plain_s, clock=clock)
        probe = replace(probe, draft_shares={**probe.draft_shares, head.name: shares})
    if path is not None and probe is not kept:
        _write(path, probe)
    return probe


def _grid(geometry: Geometry) -> Iterator[tuple[int, int]]:
    most = geometry.decode_batch_max
    widths = {1, most, *(width for width in (2, 4, 8, 16, 32) if width < most)}
    if mx.default_device() == mx.Device(mx.gpu):
        positions = range(1, geometry.depth + 2)
        widths |= {edge // count for edge in _TILE_EDGES for count in positions if 1 <= edge // count <= most}
    depths = [at for at in range(geometry.depth + 1) if at <= _EVERY_DEPTH_TO or at % 2 or at == geometry.depth]
    points = [(width, depth) for width in widths for depth in depths]
    yield from sorted(points, key=lambda point: (point[0] not in (1, most), point[0] * (point[1] + 1), point))


def _fitting_chunk(
    trunk: Trunk, geometry: Geometry, *, limit_s: float, deadline: float, clock: Callable[[], float]
) -> int:
    """The largest of a few sizes that keeps within the limit; the smallest where time runs out."""
    sizes = [size for size in _CHUNKS if size <= geometry.prefill_chunk_tokens] or [geometry.prefill_chunk_tokens]
    for size in reversed(sizes):
        if clock() > deadline or min(_time_chunk(trunk, size, clock=clock) for _ in range(2)) > limit_s:
            smaller = [other for other in sizes if other < size]
            return max(smaller, default=size)
    return sizes[0]


def _time_chunk(trunk: Trunk, tokens: int, *, clock: Callable[[], float]) -> float:
    started = clock()
    caches = trunk.new_caches()
    trunk.hidden(mx.zeros((1, tokens), mx.int32), caches)
    mx.eval(cache_arrays(caches))
    return clock() - started


def _file_name(identity: str, geometry: Geometry) -> str:
    info: Any = mx.device_info()
    machine = str(info.get("device_name", info.get("architecture", platform.machine()))) + platform.node()
    bounds = f"b{geometry.decode_batch_max}-t{geometry.depth + 1}-c{geometry.prefill_chunk_tokens}"
    return "".join(
        letter if letter.isalnum() or letter in "-@." else "_" for letter in f"{identity}-{machine}-{bounds}"
    )


def _read(path: Path) -> Probe | None:
    try:
        kept = json.loads(path.read_text())
        seconds = {(int(rows), int(depth)): float(cost) for rows, depth, cost in kept["seconds"]}
        shares = {
            str(name): {int(rows): float(share) for rows, share in by_rows}
            for name, by_rows in kept["draft_shares"].items()
        }
        return Probe(seconds, int(kept["chunk_tokens"]), shares) if (1, 0) in seconds else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        logger.warning("probe file %s cannot be read and is measured anew", path)
        return None


def _write(path: Path, probe: Probe) -> None:
    entries = [[rows, depth, cost] for (rows, depth), cost in sorted(probe.seconds.items())]
    shares = {name: sorted(by_rows.items()) for name, by_rows in probe.draft_shares.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps({"seconds": entries, "chunk_tokens": probe.chunk_tokens, "draft_shares": shares}))
    unfinished.replace(path)
