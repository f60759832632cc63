"""What should be known of a device before a lane is trusted to it: eight checks, each with a figure and a verdict.

They run on any device and need a model. How they are shown, and which of them a person asked for, is the command
line's; the slow ones do less by default and take their length as a parameter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from mtplx_core.caches.attention import fused_positions
from mtplx_core.engine import Engine, Geometry, Row, SamplingParams
from mtplx_core.models.loader import LoadedModel
from mtplx_core.models.trunk import Trunk
from mtplx_core.mtp.depth import FixedDepth
from mtplx_core.mtp.device_batch import new_trunk_cache
from mtplx_core.mtp.engine import MtpBatchEngine, MtpOptions
from mtplx_core.mtp.probe import load_or_probe, time_forward
from mtplx_core.sampling.audit import audit

_MIB = 1024 * 1024
_SHORT_PROMPT, _LONG_PROMPT = 8, 776
"""Neither row outgrows its slot, a multiple of 256 tokens, while it is measured."""
_ROOM = 1024
_MEASURED_CYCLES = 16
_COPIED_SHARE = 0.5
"""Of the caches: a copy of all of them raises the peak by 1."""
_SLOW_FIRST_CYCLE = 5.0
"""A first cycle after idling may take this many usual ones."""


class Check(NamedTuple):
    """The outcome of one check."""

    name: str
    passed: bool
    figures: str


@dataclass(frozen=True, slots=True)
class Effort:
    """How long the slow checks run."""

    memory_cycles: int = 200
    flat_cycles: int = 400
    """A thorough run takes 100,000."""
    idle_s: float = 5.0
    """A thorough run waits 60."""
    churn_s: float = 10.0
    """A thorough run takes 1,200 with and without a wired limit."""
    most_rows: int = 64
    """Rows of the checks that decode, if the lane has as many."""

    @classmethod
    def of_this_device(cls) -> Effort:
        """Minutes on a GPU; less than one on a CPU, where a cycle takes as long as a hundred there."""
        if mx.default_device() == mx.Device(mx.gpu):
            return cls()
        return cls(memory_cycles=32, flat_cycles=48, idle_s=2.0, churn_s=3.0, most_rows=4)


def run_device_checks(
    loaded: LoadedModel,
    geometry: Geometry,
    *,
    probe_dir: Path | None,
    effort: Effort | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Check]:
    """Run all checks, yielding each as it ends.

    Args:
        probe_dir: where the forward-time table is saved for the depth policy.
    """
    effort = effort or Effort.of_this_device()
    trunk = Trunk(loaded.model)
    yield check_fused_attention(trunk, geometry)
    yield check_forward_times(trunk, loaded, geometry, probe_dir=probe_dir, clock=clock)
    geometry = replace(geometry, decode_batch_max=min(geometry.decode_batch_max, effort.most_rows))
    yield check_peak_memory(loaded, geometry, cycles=effort.memory_cycles)
    yield check_flat_memory(loaded, geometry, cycles=effort.flat_cycles)
    yield check_rows_alone(trunk)
    yield check_idle(trunk, idle_s=effort.idle_s, clock=clock, sleep=sleep)
    yield check_cache_churn(loaded, geometry, seconds=effort.churn_s, clock=clock)
    yield check_restart(loaded, geometry)


def check_fused_attention(trunk: Trunk, geometry: Geometry) -> Check:
    """Whether attention of a verify step stays within what the fused GPU kernel takes."""
    name = "attention of a verify step is fused"
    shape = new_trunk_cache(trunk, max_positions=1).attention[0].shape
    shared, positions = trunk.query_heads // shape.heads, geometry.depth + 1
    sizes = f"head size {shape.key_size}/{shape.value_size}, {shared} queries per key head, {positions} positions"
    if mx.default_device() != mx.Device(mx.gpu):
        return Check(name, True, f"{sizes}; this CPU has no fused kernel, every depth runs unfused")
    sizes_fit = (shape.key_size, shape.value_size) in {(64, 64), (96, 96), (128, 128), (256, 256), (192, 128)}
    fits = sizes_fit and positions <= fused_positions(shared)
    return Check(name, fits, sizes if fits else f"{sizes}; outside what the kernel takes, depth should be lower")


def check_forward_times(
    trunk: Trunk, loaded: LoadedModel, geometry: Geometry, *, probe_dir: Path | None, clock: Callable[[], float]
) -> Check:
    """Measures the table the depth policy starts from, and saves it over the one that was kept."""
    probe = load_or_probe(trunk, geometry, identity=loaded.identity, folder=probe_dir, clock=clock, is_renewed=True)
    times = ", ".join(
        f"{rows}x{depth + 1} {1e3 * cost:.1f} ms" for (rows, depth), cost in sorted(probe.seconds.items())
    )
    grows = probe.seconds[max(probe.seconds)] >= 0.5 * probe.seconds[1, 0]
    return Check("forward times by rows and positions", grows, f"{times}; prefill chunk {probe.chunk_tokens}")


def check_peak_memory(
    loaded: LoadedModel, geometry: Geometry, *, cycles: int, kind: type[MtpBatchEngine] = MtpBatchEngine
) -> Check:
    """Whether caches are written in place: where they are copied, the peak of a cycle grows with them.

    What else a cycle needs is the same over short and over long caches, so their difference tells of copies alone.
    """
    geometry = replace(geometry, max_context_tokens=max(geometry.max_context_tokens, _ROOM))
    few = min(cycles // 2, _MEASURED_CYCLES)
    short, long = (_peak(kind, loaded, geometry, prompt=p, cycles=few) for p in (_SHORT_PROMPT, _LONG_PROMPT))
    grown = long.kv_bytes - short.kv_bytes
    copies = (long.extra - short.extra) / max(grown, 1)
    figures = f"caches of {grown / _MIB:.1f} MiB more raise the peak of a cycle by {copies:.2f} of that"
    return Check("caches are written in place", copies < _COPIED_SHARE, figures)


class _Peak(NamedTuple):
    """Memory around some cycles."""

    extra: int
    """Bytes at the peak beyond what was in use before."""
    kv_bytes: int


def _peak(kind: type[MtpBatchEngine], loaded: LoadedModel, geometry: Geometry, *, prompt: int, cycles: int) -> _Peak:
    """Of cycles in which the caches do not grow; one row has a prompt of so many tokens, and all slots room for it."""
    engine = kind(loaded, geometry, options=MtpOptions(policy=FixedDepth(min(geometry.depth, 7))))
    for row in range(geometry.decode_batch_max):
        tokens = (3,) * prompt if row == 0 else (1 + row, 2, 3)
        engine.admit(Row(f"r{row}", tokens, _ROOM - _LONG_PROMPT, ignore_eos=True))
    while engine.snapshot()["prefill_rows"]:
        engine.step()
    for _ in range(4):
        engine.step()
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(cycles):
        engine.step()
    peak = _Peak(mx.get_peak_memory() - before, int(engine.snapshot()["kv_bytes"]))
    engine.close()
    return peak


def check_flat_memory(loaded: LoadedModel, geometry: Geometry, *, cycles: int) -> Check:
    """Whether memory in use is the same after many cycles of rows that come and go."""
    marks = []
    engine = _engine(loaded, geometry)
    for _ in range(4):
        for _ in range(cycles // 4):
            if not engine.active_rows:
                _admit(engine, geometry, tokens=16)
            engine.step()
        while engine.active_rows:
            engine.step()
        mx.clear_cache()
        marks.append(mx.get_active_memory())
    engine.close()
    rise = marks[-1] - marks[0]
    return Check("memory stays flat", rise < 8 * _MIB, f"{rise / _MIB:.1f} MiB more after {cycles} cycles")


def check_rows_alone(trunk: Trunk) -> Check:
    """Whether rows of different lengths in one batch get what each gets alone, rotation included."""
    lengths, room = (3, 17, 40), 64
    ids = mx.array([[(7 * place + row) % trunk.vocab_size for place in range(room)] for row in range(3)], mx.int32)
    cache = new_trunk_cache(trunk, max_positions=1)
    cache.reserve(len(lengths), room)
    alone = []
    for row, length in enumerate(lengths):
        caches = trunk.new_caches()
        trunk.hidden(ids[row : row + 1, :length], caches)
        cache.insert(row, caches)
        alone.append(trunk.hidden(ids[row : row + 1, length : length + 1], caches))
    offset = mx.array(lengths, mx.int32)
    cache.begin(offset, 1, longest=max(lengths) + 1)
    together = trunk.hidden(mx.take_along_axis(ids, offset[:, None], axis=1), cache.layers)
    wanted = mx.concatenate(alone)
    error: Any = (mx.abs(together - wanted).max() / mx.abs(wanted).max()).item()
    limit = 1e-4 if trunk.dtype == mx.float32 else 5e-2
    return Check("rows in a batch equal rows alone", error < limit, f"largest relative difference {error:.1e}")


def check_idle(trunk: Trunk, *, idle_s: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> Check:
    """How slow the first forward after idling is; unwired memory may have to come back."""
    usual_s = time_forward(trunk, rows=1, positions=1, clock=clock)
    sleep(idle_s)
    started = clock()
    mx.eval(trunk.logits(trunk.hidden(mx.zeros((1, 1), mx.int32))))
    first_s = clock() - started
    figures = f"usually {1e3 * usual_s:.1f} ms, after {idle_s:.0f} s idle {1e3 * first_s:.1f} ms"
    return Check("first forward after idling", first_s < _SLOW_FIRST_CYCLE * usual_s + 0.2, figures)


def check_cache_churn(loaded: LoadedModel, geometry: Geometry, *, seconds: float, clock: Callable[[], float]) -> Check:
    """Decodes while buffers of changing sizes are made and freed on a second stream."""
    engine = _engine(loaded, geometry)
    stream: Any = mx.new_stream(mx.default_device())
    deadline, cycles = clock() + seconds, 0
    while clock() < deadline:
        if not engine.active_rows:
            _admit(engine, geometry, tokens=24)
        engine.step()
        with mx.stream(stream):
            mx.eval(mx.ones((1 + cycles % 7, 1 << (12 + cycles % 8))).sum())
        cycles += 1
    engine.close()
    return Check("two streams and changing buffers", cycles > 0, f"{cycles} cycles in {seconds:.0f} s without an error")


def check_restart(loaded: LoadedModel, geometry: Geometry) -> Check:
    """Whether a second engine takes a row over where the first was dropped, and says what sampling says there."""
    row = Row("row", (1, 2, 3, 4), 24, SamplingParams(temperature=0.8, seed=7), ignore_eos=True)
    whole = _run(_engine(loaded, geometry), row)
    resumed = Row("row", row.prompt, row.max_tokens, row.sampling, committed=tuple(whole[:11]), ignore_eos=True)
    rest = _run(_engine(loaded, geometry), resumed)
    agreed = sum(one == other for one, other in zip(whole[11:], rest, strict=True))
    heard = audit(loaded.model, row.prompt, [*whole[:11], *rest], row.sampling)
    return Check("a row goes on after its engine is dropped", heard.passed, f"{agreed} of {len(rest)} tokens the same")


def _engine(loaded: LoadedModel, geometry: Geometry) -> Engine:
    return MtpBatchEngine(loaded, geometry, options=MtpOptions(policy=FixedDepth(geometry.depth)))


def _admit(engine: Engine, geometry: Geometry, *, tokens: int) -> None:
    most = geometry.max_context_tokens - 8
    for row in range(geometry.decode_batch_max):
        engine.admit(Row(f"r{row}", (1 + row, 2, 3), min(tokens + 3 * row, most), ignore_eos=True))


def _run(engine: Engine, row: Row) -> list[int]:
    engine.admit(row)
    tokens: list[int] = []
    while engine.active_rows:
        tokens += [token for part in engine.step().tokens for token in part.tokens]
    engine.close()
    return tokens
