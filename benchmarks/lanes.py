"""The MTP lane against mlx-lm's batch generator, decoding the same prompts in one process, in turn.

`python -m benchmarks.lanes [--quick] [--json] [--rows 1,8] [--only greedy] [--head FOLDER] [--model FOLDER] [--talks]`.
Prompts are chat prompts of mixed length; prefill is not measured. Every ratio is the median over pairs of blocks; a
block ends when the device has finished it. A pair of narrow batches goes over several prompts, since what is accepted
differs more between answers than the machine's moods do between pairs.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import click

from benchmarks.prompts import PromptWriter, TalkWriter, Writer
from benchmarks.ratios import Ratio, median, paired_ratio, report

SHORTEST, LONGEST = 20, 600
CONTEXT = 2048
TEMPERATURES = {"greedy": 0.0, "sampled": 0.8}
NON_TRUNK_WIDTHS = (1, 2, 4, 8)
WARM_CYCLES = 4
"""Of each lane, before the first block of its prompts."""
FORWARDS = 3
"""Timed alone after each pair of blocks, by depth that was used."""


class Block(NamedTuple):
    """One stretch of decoding."""

    seconds: float
    tokens: int
    cycles: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def cycle_s(self) -> float:
        return self.seconds / self.cycles

    def and_then(self, other: Block) -> Block:
        return Block(self.seconds + other.seconds, self.tokens + other.tokens, self.cycles + other.cycles)


class Lane(Protocol):
    """Something that decodes a fixed set of rows, one cycle at a time."""

    def cycle(self) -> int:
        """One cycle; the tokens it brought, over all rows."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    pairs: int = 7
    cycles: int = 16
    """Of each lane over each batch of prompts."""
    rows_per_pair: int = 4
    """At least; narrower batches take so many more prompts in each pair."""
    rows: int = 16
    """Over all pairs, at least; wider batches decode the same prompts in every pair."""

    def batches(self, width: int) -> list[list[int]]:
        """Numbers of the batches of prompts that each pair decodes."""
        each = self.rows_per_pair // width
        if each > 1:
            return [list(range(pair * each, (pair + 1) * each)) for pair in range(self.pairs)]
        whole = max(1, self.rows // width)
        return [[pair * whole // self.pairs] for pair in range(self.pairs)]


class Compared(NamedTuple):
    """A block of each lane over the same prompts."""

    reference: Block
    tested: Block
    forward_s: float
    """The trunk forwards of the tested block, timed alone."""
    depths: Counter[int]


@dataclass
class Measured:
    """Everything about one width and temperature; a block and its forwards for each pair."""

    reference: list[Block] = field(default_factory=list)
    tested: list[Block] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    depths: Counter[int] = field(default_factory=Counter)

    def add(self, compared: Compared, *, is_new_pair: bool) -> None:
        if is_new_pair:
            self.reference.append(compared.reference)
            self.tested.append(compared.tested)
            self.forward_s.append(compared.forward_s)
        else:
            self.reference[-1] = self.reference[-1].and_then(compared.reference)
            self.tested[-1] = self.tested[-1].and_then(compared.tested)
            self.forward_s[-1] += compared.forward_s
        self.depths += compared.depths

    @property
    def ratio(self) -> Ratio:
        return paired_ratio(
            [block.tokens_per_s for block in self.tested], [block.tokens_per_s for block in self.reference]
        )

    def accepted(self, rows: int) -> float:
        """Drafts accepted per row and cycle."""
        return sum(b.tokens for b in self.tested) / sum(b.cycles for b in self.tested) / rows - 1

    def of_allowed(self) -> float:
        """Of the ratio that would come out if a cycle cost its trunk forward alone; what is accepted drops out."""
        return median([forward / block.seconds for block, forward in zip(self.tested, self.forward_s, strict=True)])

    def non_trunk(self) -> float:
        """Share of a cycle that is not the trunk's forward."""
        return max(0.0, 1 - self.of_allowed())


@click.command()
@click.option("--quick", is_flag=True, help="Fewer pairs, shorter blocks, three widths.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--rows", default="", help="Widths, comma separated, to split a long run into pieces.")
@click.option("--only", type=click.Choice(list(TEMPERATURES)), help="One of the two ways of sampling.")
@click.option("--model", type=click.Path(path_type=Path, exists=True), help="By default SmolLM2-135M.")
@click.option("--head", "head_folder", type=click.Path(path_type=Path), help="Else the model's, or the shipped one.")
@click.option("--depth", type=int, help="Most tokens drafted per row and cycle; by default as a worker.")
@click.option("--fixed", is_flag=True, help="Always draft that many instead of choosing the depth by cycle.")
@click.option("--talks", is_flag=True, help="Prompts of the small checkpoint's own kind instead of chats.")
@click.option("--in-turn", is_flag=True, help="Read every cycle before the next is built, on a GPU too.")
def main(
    *,
    quick: bool,
    as_json: bool,
    rows: str,
    only: str | None,
    model: Path | None,
    head_folder: Path | None,
    depth: int | None,
    fixed: bool,
    talks: bool,
    in_turn: bool,
) -> None:
    """Measure."""
    from mtplx_core.blas import load_blas

    blas = load_blas()
    effort = Effort(pairs=3, cycles=8, rows_per_pair=1, rows=2) if quick else Effort()
    overlaps = False if in_turn else None
    bench = Bench(model, head_folder, effort=effort, depth=depth, is_fixed=fixed, overlaps=overlaps, are_talks=talks)
    click.echo(f"{bench.describe()}, {blas}, {'talks' if talks else 'chat prompts'} of {SHORTEST} to {LONGEST} tokens")
    widths = [int(width) for width in rows.split(",")] if rows else [1, 4, 8] if quick else [1, 2, 4, 8, 16, 32]
    shown: dict[str, dict[str, float]] = {}
    non_trunk: dict[str, float] = {}
    for width in widths:
        shown[str(width)] = {}
        for name in [only] if only else TEMPERATURES:
            measured = bench.measure(width, TEMPERATURES[name])
            click.echo(_line(width, name, measured))
            shown[str(width)] |= {name: measured.ratio.median}
            shown[str(width)].setdefault("accepted", measured.accepted(width))
            if width in NON_TRUNK_WIDTHS:
                non_trunk[str(width)] = max(non_trunk.get(str(width), 0.0), measured.non_trunk())
    report([], {"rows": shown, "non_trunk": non_trunk}, as_json=as_json)


class Bench:
    """The model and its head, loaded once."""

    def __init__(
        self,
        model: Path | None,
        head_folder: Path | None,
        *,
        effort: Effort,
        depth: int | None,
        is_fixed: bool,
        overlaps: bool | None,
        are_talks: bool = False,
    ) -> None:
        from mtplx_core.models.fetch import default_cache_dir, default_model_dir
        from mtplx_core.models.loader import load_model
        from mtplx_core.models.trunk import Trunk
        from mtplx_core.mtp.assemble import find_head, usual_depth

        folder = model or default_model_dir(default_cache_dir(os.environ))
        self.loaded = load_model(folder)
        self._head = find_head(head_folder, self.loaded)
        self._writer: Writer = TalkWriter(folder) if are_talks else PromptWriter(folder)
        self._depth = depth or usual_depth(Trunk(self.loaded.model))
        self._is_fixed = is_fixed
        self._overlaps = overlaps
        self._effort = effort

    def describe(self) -> str:
        drafts = "lookup" if self._head is None else f"lookup and head {self._head.name}"
        how = "always" if self._is_fixed else "at most"
        name = f"{self.loaded.name} {str(self.loaded.dtype).removeprefix('mlx.core.')}"
        effort = self._effort
        blocks = f"{effort.pairs} pairs of {effort.cycles} cycles over at least {effort.rows_per_pair} rows"
        return f"{name}, {drafts}, depth {how} {self._depth}, {blocks}"

    def measure(self, width: int, temperature: float) -> Measured:
        measured, tested = Measured(), EngineLane(self, width)
        batches = self._effort.batches(width)
        prompts = self._prompts(width, batches[-1][-1] + 1)
        reference, current = None, None
        for pair, numbers in enumerate(batches):
            for place, number in enumerate(numbers):
                if reference is None or number != current:
                    if reference is not None:
                        reference.close()
                    reference, current = GeneratorLane(self.loaded.model, prompts[number], temperature), number
                    tested.take(prompts[number], temperature)
                    for lane in (reference, tested):
                        _block(lane, WARM_CYCLES)
                compared = self._compare(reference, tested, is_tested_first=(pair + place) % 2 == 1)
                measured.add(compared, is_new_pair=place == 0)
        tested.close()
        return measured

    def engine(self, width: int) -> Any:
        """As a worker makes it, its measurements of this machine included."""
        from mtplx_core.engine import Geometry
        from mtplx_core.mtp.assemble import build_mtp_engine
        from mtplx_core.mtp.depth import FixedDepth
        from mtplx_core.mtp.engine import MtpBatchEngine, MtpOptions

        geometry = Geometry(width, min(CONTEXT, self.loaded.max_context), self._depth)
        if self._is_fixed:
            options = MtpOptions(policy=FixedDepth(self._depth), overlaps=self._overlaps)
            return MtpBatchEngine(self.loaded, geometry, head=self._head, options=options)
        with tempfile.TemporaryDirectory() as probes:
            return build_mtp_engine(
                self.loaded, geometry, head=self._head, probe_dir=Path(probes), overlaps=self._overlaps
            )

    def _compare(self, reference: GeneratorLane, tested: EngineLane, *, is_tested_first: bool) -> Compared:
        blocks: dict[bool, Block] = {}
        before = tested.depths()
        for is_tested in (is_tested_first, not is_tested_first):
            blocks[is_tested] = _block(tested if is_tested else reference, self._effort.cycles)
        depths = tested.depths() - before
        spent_s = sum(tested.forward_s(depth) * count for depth, count in depths.items())
        return Compared(blocks[False], blocks[True], spent_s * self._effort.cycles / depths.total(), depths)

    def _prompts(self, width: int, batches: int) -> list[list[tuple[int, ...]]]:
        """Batches of prompts; lengths are spread over each batch, and over the batches where they are narrow."""
        count = width * batches
        lengths = [round(SHORTEST + (LONGEST - SHORTEST) * place / max(count - 1, 1)) for place in range(count)]
        return [
            [self._writer.write(number * width + row, tokens=lengths[row * batches + number]) for row in range(width)]
            for number in range(batches)
        ]


class GeneratorLane:
    """mlx-lm's batch generator with one shared sampler object."""

    def __init__(self, model: Any, prompts: Sequence[tuple[int, ...]], temperature: float) -> None:
        from mlx_lm.generate import BatchGenerator
        from mlx_lm.sample_utils import make_sampler

        self._generator: Any = BatchGenerator(
            model,
            max_tokens=100_000,
            sampler=make_sampler(temp=temperature),
            completion_batch_size=len(prompts),
            prefill_batch_size=len(prompts),
        )
        self._generator.insert([list(prompt) for prompt in prompts])
        while self.cycle() < len(prompts):
            pass

    def cycle(self) -> int:
        _, decoded = self._generator.next()
        return len(decoded)

    def close(self) -> None:
        self._generator.close()
        self._generator = None


class EngineLane:
    """The MTP lane's engine, one for all the prompts of a width, as in service."""

    def __init__(self, bench: Bench, width: int) -> None:
        self._engine = bench.engine(width)
        self._names: list[str] = []
        self._lengths: list[int] = []
        self._taken = 0

    def take(self, prompts: Sequence[tuple[int, ...]], temperature: float) -> None:
        """Drop the rows that run, and bring these to where they decode."""
        from mtplx_core.engine import Row, SamplingParams

        for name in self._names:
            self._engine.discard(name)
        self._names = [f"r{self._taken + place}" for place in range(len(prompts))]
        self._lengths = [len(prompt) for prompt in prompts]
        most = self._engine.geometry.max_context_tokens
        for name, prompt in zip(self._names, prompts, strict=True):
            sampling = SamplingParams(temperature=temperature, seed=self._taken)
            self._engine.admit(Row(name, prompt, most - len(prompt), sampling, ignore_eos=True))
            self._taken += 1
        while self._engine.snapshot()["prefill_rows"]:
            self.cycle()

    def cycle(self) -> int:
        told = self._engine.step().tokens
        for part in told:
            if part.row_id in self._names:
                self._lengths[self._names.index(part.row_id)] += len(part.tokens)
        return sum(len(part.tokens) for part in told)

    def depths(self) -> Counter[int]:
        return Counter({int(depth): count for depth, count in self._engine.snapshot()["cycles_by_depth"].items()})

    def forward_s(self, depth: int) -> float:
        from mtplx_core.mtp.probe import forward_times

        lengths = [length + depth for length in self._lengths]
        clock = time.perf_counter
        return median(forward_times(self._engine.trunk, lengths, positions=depth + 1, clock=clock, repeats=FORWARDS))

    def close(self) -> None:
        import mlx.core as mx

        self._engine.close()
        mx.clear_cache()


def _block(lane: Lane, cycles: int) -> Block:
    """Time some cycles up to the moment the device is done with them."""
    import mlx.core as mx

    started = time.perf_counter()
    tokens = sum(lane.cycle() for _ in range(cycles))
    mx.synchronize()
    return Block(time.perf_counter() - started, tokens, cycles)


def _line(width: int, name: str, measured: Measured) -> str:
    plain_ms = 1e3 * median([block.cycle_s for block in measured.reference])
    cycle_ms = 1e3 * median([block.cycle_s for block in measured.tested])
    depths = " ".join(f"{depth}:{count}" for depth, count in sorted(measured.depths.items()))
    return (
        f"{width:3d} rows, {name:8s} {measured.ratio}  accepted {measured.accepted(width):.2f}  of what the forward "
        f"allows {measured.of_allowed():.3f}  plain step {plain_ms:.0f} ms, cycle {cycle_ms:.0f} ms  "
        f"cycles by depth {depths}"
    )


if __name__ == "__main__":
    main()
