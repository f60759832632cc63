"""Measures what forwards cost here: the table the depth policy starts from and the prefill chunk that fits a cycle.

At most `budget_s` are spent at start-up; the outcome is kept in a file per machine and model. It can be measured anew
step by step, a forward each, while a lane has nothing else to do. The clock is given.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import mlx.core as mx

from mtplx_core.caches.ragged import cache_arrays, plain_caches
from mtplx_core.engine import Geometry
from mtplx_core.heads.base import Head
from mtplx_core.models.trunk import Trunk
from mtplx_core.mtp.cost_table import CostTable, assumed_costs
from mtplx_core.mtp.device_batch import new_head_drafter, new_trunk_cache
from mtplx_core.mtp.key_cost import KeyCost
from mtplx_core.mtp.probe_file import probe_file, read_probe, write_probe

logger = logging.getLogger(__name__)

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Work that stops behind every forward, and then is something."""

ATTENDED_TOKENS = 256
"""Context length the table is measured at."""
LONG_TOKENS = 2048
"""Context length, at most, at which the cost of keys is measured beside it."""
_LONG_FORWARDS = 12
"""What measuring that may take, in forwards at the usual length."""
_QUIET_SPREAD = 0.25
"""Repetitions that take so much longer than the shortest, usually, were made on a machine that was busy."""
_OLD_S = 30 * 24 * 3600.0
_REPEATS = 3
_REPEATS_OF_SHORT = 12
_SHORT_S = 0.05
"""Of all repetitions."""
_CHUNKS = (512, 256, 128, 64, 32)
_FOR_CHUNKS = 0.25
"""Of the budget."""
_CHUNK_REPEATS = 2
_IDLE_BUDGET_S = 600.0
"""More than any machine takes."""
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
    """Prefill chunk. Where prompts are cut decides roundings, so a lane keeps the one that it was started with."""
    draft_shares: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """By head, what a draft of it costs beside a plain step of so many rows."""
    key_s: tuple[float, float] = (0.0, 0.0)
    """Seconds that one more attended key adds to a forward, and that it adds for each draft."""
    is_whole: bool = True
    """Whether there was time for all of it."""
    spread: float = 0.0
    """How much longer than the shortest repetition the usual one took, by the median of what was measured."""
    made_s: float = 0.0
    """When, in seconds of the epoch."""

    @property
    def is_doubtful(self) -> bool:
        """Whether it was cut short, or made on a machine that was busy."""
        return not self.is_whole or self.spread > _QUIET_SPREAD

    def is_old(self, now_s: float) -> bool:
        return not 0 <= now_s - self.made_s < _OLD_S

    def cost_table(self, geometry: Geometry) -> CostTable:
        """Costs for a depth policy; where no draft was measured, they grow as assumed."""
        return CostTable(self.costs(geometry), row_keys=ATTENDED_TOKENS, key_cost=KeyCost(*self.key_s))

    def costs(self, geometry: Geometry) -> dict[tuple[int, int], float]:
        """What the cost table starts from."""
        measured = {(rows, depth): cost for (rows, depth), cost in self.seconds.items() if depth <= geometry.depth}
        if not any(depth for _, depth in measured):
            assumed = assumed_costs(rows=geometry.decode_batch_max, depth=geometry.depth)
            measured[1, geometry.depth] = measured[1, 0] * assumed.cost(1, geometry.depth) / assumed.cost(1, 0)
        return measured

    def share_table(self, head: Head) -> CostTable:
        """What a draft of this head costs in plain steps, by rows."""
        return CostTable({(rows, 0): share for rows, share in self.draft_shares[head.name].items()}, has_mood=False)


class _Timed(NamedTuple):
    """Some repetitions of one step."""

    usual_s: float
    spread: float


def finished(steps: Steps[T]) -> T:
    """Do all the steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def probe_forwards(trunk: Trunk, geometry: Geometry, *, clock: Callable[[], float], budget_s: float = 10.0) -> Probe:
    """Measure until done or out of budget, most telling points first."""
    return finished(probe_steps(trunk, geometry, clock=clock, budget_s=budget_s))


def probe_steps(trunk: Trunk, geometry: Geometry, *, clock: Callable[[], float], budget_s: float) -> Steps[Probe]:
    """See `probe_forwards`."""
    deadline = clock() + budget_s
    timed: dict[tuple[int, int], _Timed] = {}
    points = list(_grid(geometry))
    for rows, depth in points:
        started = clock()
        timed[rows, depth] = yield from _timing(_forward(trunk, [ATTENDED_TOKENS] * rows, depth + 1), clock=clock)
        # A wider point may take twice as long; the rest is for the prefill chunk.
        if clock() + 2 * (clock() - started) > deadline - _FOR_CHUNKS * budget_s:
            logger.info("probe stopped at %d of %d points", len(timed), len(points))
            break
    seconds = {point: times.usual_s for point, times in timed.items()}
    is_whole, key_s = len(timed) == len(points), (0.0, 0.0)
    if is_whole:
        widest_s = seconds[geometry.decode_batch_max, 0] + seconds[geometry.decode_batch_max, geometry.depth]
        is_whole = clock() + _LONG_FORWARDS * widest_s < deadline - _FOR_CHUNKS * budget_s
        key_s = (yield from _key_steps(trunk, geometry, seconds, clock=clock)) if is_whole else key_s
    widest = max(rows for rows, depth in seconds if depth == 0)
    limit_s = _CHUNK_CYCLES * seconds[widest, 0]
    chunk = yield from _fitting_chunk(trunk, geometry, limit_s=limit_s, deadline=deadline, clock=clock)
    spread = statistics.median(times.spread for times in timed.values())
    return Probe(seconds, chunk, key_s=key_s, is_whole=is_whole, spread=spread)


def time_forward(trunk: Trunk, *, rows: int, positions: int, clock: Callable[[], float]) -> float:
    """Seconds of one forward with logits at a usual length, the median of a few."""
    return finished(_timing(_forward(trunk, [ATTENDED_TOKENS] * rows, positions), clock=clock)).usual_s


def draft_shares(
    trunk: Trunk, head: Head, *, plain_s: Mapping[int, float], clock: Callable[[], float]
) -> dict[int, float]:
    """What the first draft of a cycle costs, by rows, as a share of a plain step of as many.

    Args:
        plain_s: seconds of such steps by rows.
    """
    return finished(_share_steps(trunk, head, plain_s=plain_s, clock=clock))


def _share_steps(
    trunk: Trunk, head: Head, *, plain_s: Mapping[int, float], clock: Callable[[], float]
) -> Steps[dict[int, float]]:
    shares = {}
    for rows, seconds in plain_s.items():
        timed = yield from _timing(_draft(trunk, head, rows), clock=clock)
        shares[rows] = timed.usual_s / seconds
    return shares


def _key_steps(
    trunk: Trunk, geometry: Geometry, seconds: Mapping[tuple[int, int], float], *, clock: Callable[[], float]
) -> Steps[tuple[float, float]]:
    """What a key adds, from the widest forwards over longer rows; nothing where rows cannot be much longer."""
    rows, deepest, longer = geometry.decode_batch_max, geometry.depth, min(LONG_TOKENS, geometry.max_context_tokens)
    if longer < 2 * ATTENDED_TOKENS:
        return 0.0, 0.0
    added = {}
    for depth in {0, deepest}:
        timed = yield from _timing(_forward(trunk, [longer] * rows, depth + 1), clock=clock)
        added[depth] = max(timed.usual_s - seconds[rows, depth], 0.0) / (rows * (longer - ATTENDED_TOKENS))
    return added[0], max(added[deepest] - added[0], 0.0) / max(deepest, 1)


def _timing(step: Callable[[], None], *, clock: Callable[[], float]) -> Steps[_Timed]:
    """The median of a few repetitions, of more where they are so short that little disturbs them much."""
    step()
    yield
    times: list[float] = []
    for repeats in (_REPEATS, _REPEATS_OF_SHORT):
        if sum(times) < _SHORT_S:
            for _ in range(repeats):
                started = clock()
                step()
                times.append(clock() - started)
                yield
    usual_s, shortest_s = statistics.median(times), min(times)
    return _Timed(usual_s, usual_s / shortest_s - 1 if shortest_s > 0 else 0.0)


def _draft(trunk: Trunk, head: Head, rows: int) -> Callable[[], None]:
    """A cycle's first draft, with the pair that the cycle before left behind."""
    drafter = new_head_drafter(trunk, head, max_depth=1)
    longest = ATTENDED_TOKENS + 1 + _REPEATS + _REPEATS_OF_SHORT + 1
    drafter.cache.reserve(rows, longest + 2)
    probe = plain_caches(head.cached_layers)
    head(
        mx.zeros((1, ATTENDED_TOKENS, trunk.hidden_size), trunk.dtype), mx.zeros((1, ATTENDED_TOKENS), mx.int32), probe
    )
    hidden, tokens = mx.zeros((rows, 1, trunk.hidden_size), trunk.dtype), mx.zeros((rows, 1), mx.int32)
    for slot in range(rows):
        drafter.seat(slot, probe, hidden[:1], 0)

    def step() -> None:
        drafts = drafter.draft(lambda logits, _: mx.argmax(logits[:, 0], axis=-1), 1, longest=longest, parked=None)
        drafter.commit(hidden, tokens, mx.ones((rows,), mx.int32), most=1)
        mx.eval(drafts, drafter.pending)

    return step


def _forward(trunk: Trunk, lengths: Sequence[int], positions: int) -> Callable[[], None]:
    """A forward with logits and with what it leaves in the caches; `lengths` as in `forward_times`."""
    rows, longest = len(lengths), max(lengths)
    cache = new_trunk_cache(trunk, max_positions=positions)
    cache.reserve(rows, longest)
    tokens = mx.zeros((rows, positions), mx.int32)
    offset = mx.array(list(lengths), mx.int32) - positions

    def step() -> None:
        cache.begin(offset, positions, longest=longest, lengths=lengths)
        logits = trunk.logits(trunk.hidden(tokens, cache.layers))
        cache.commit(mx.ones((rows,), mx.int32), known=[1] * rows)
        mx.eval(logits, [layer.arrays for layer in cache.recurrent])

    return step


def forward_times(
    trunk: Trunk, lengths: Sequence[int], *, positions: int, clock: Callable[[], float], repeats: int
) -> list[float]:
    """Seconds of each of some forwards with logits and with what they leave in the caches, after one to warm up.

    Args:
        lengths: tokens each row has once `positions` of them are fed.
    """
    step, times = _forward(trunk, lengths, positions), []
    for _ in range(repeats + 1):
        started = clock()
        step()
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
    path = probe_file(folder, identity, geometry) if folder is not None else None
    parts = read_probe(path) if path is not None and not is_renewed else None
    kept = Probe(**parts) if parts is not None else None
    probe = kept or replace(probe_forwards(trunk, geometry, clock=clock), made_s=time.time())
    if head is not None and head.name not in probe.draft_shares:
        shares = draft_shares(trunk, head, plain_s=_plain_s(probe, geometry), clock=clock)
        probe = replace(probe, draft_shares={**probe.draft_shares, head.name: shares})
    if path is not None and probe is not kept:
        write_probe(path, probe)
    return probe


def probe_anew(
    trunk: Trunk, geometry: Geometry, kept: Probe, *, head: Head | None, clock: Callable[[], float]
) -> Steps[Probe]:
    """Measure all of it without a bound, and return the more trustworthy of it and the kept one, as of now."""
    probe = yield from probe_steps(trunk, geometry, clock=clock, budget_s=_IDLE_BUDGET_S)
    shares = dict(kept.draft_shares)
    if head is not None:
        shares[head.name] = yield from _share_steps(trunk, head, plain_s=_plain_s(probe, geometry), clock=clock)
    made = replace(probe, draft_shares=shares, made_s=time.time())
    is_still_good = kept.is_whole and not kept.is_old(made.made_s)
    return kept if is_still_good and kept.spread < made.spread else made


def _plain_s(probe: Probe, geometry: Geometry) -> dict[int, float]:
    return {rows: probe.seconds[rows, 0] for rows in (1, geometry.decode_batch_max) if (rows, 0) in probe.seconds}


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
) -> Steps[int]:
    """The largest of a few sizes that keeps within the limit; the smallest where time runs out."""
    sizes = [size for size in _CHUNKS if size <= geometry.prefill_chunk_tokens] or [geometry.prefill_chunk_tokens]
    for size in reversed(sizes):
        times: list[float] = []
        while clock() <= deadline and len(times) < _CHUNK_REPEATS:
            times.append(_time_chunk(trunk, size, clock=clock))
            yield
        if len(times) < _CHUNK_REPEATS or min(times) > limit_s:
            smaller = [other for other in sizes if other < size]
            return max(smaller, default=size)
    return sizes[0]


def _time_chunk(trunk: Trunk, tokens: int, *, clock: Callable[[], float]) -> float:
    started = clock()
    caches = trunk.new_caches()
    trunk.hidden(mx.zeros((1, tokens), mx.int32), caches)
    mx.eval(cache_arrays(caches))
    return clock() - started
