"""The MTP lane against mlx-lm's batch generator, decoding the same prompts on the same machine in turn.

`python -m benchmarks.lanes [--quick] [--json] [--head FOLDER] [--widths 1,8]`. Prompts are of mixed length. Prefill is
not measured. Every ratio is the median over pairs of blocks; a block ends when the device has finished it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import click

from benchmarks.ratios import Ratio, median, paired_ratio, report

SHORTEST, LONGEST = 20, 600
TEMPERATURE = 0.8
NON_TRUNK_WIDTHS = (1, 2, 4, 8)


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


class Lane(Protocol):
    """Something that decodes a fixed set of rows, one cycle at a time."""

    def cycle(self) -> int:
        """One cycle; the tokens it brought, over all rows."""


@dataclass
class Measured:
    """Everything about one width and temperature."""

    reference: list[Block] = field(default_factory=list)
    tested: list[Block] = field(default_factory=list)
    forward_s: dict[int, float] = field(default_factory=dict)
    """Trunk forward by depth, at the rows' attended length."""
    depths: dict[int, int] = field(default_factory=dict)

    @property
    def ratio(self) -> Ratio:
        return paired_ratio(
            [block.tokens_per_s for block in self.tested], [block.tokens_per_s for block in self.reference]
        )

    def accepted(self, rows: int) -> float:
        """Drafts accepted per row and cycle."""
        return sum(b.tokens for b in self.tested) / sum(b.cycles for b in self.tested) / rows - 1

    def allowed(self, rows: int) -> float:
        """The ratio that would come out if a cycle cost its trunk forward alone."""
        plain_s = median([block.cycle_s for block in self.reference])
        cycles = sum(self.depths.values())
        verify_s = sum(self.forward_s[depth] * count for depth, count in self.depths.items()) / cycles
        return (1 + self.accepted(rows)) * plain_s / verify_s

    def non_trunk(self) -> float:
        """Share of a cycle that is not the trunk's forward, by the fastest cycles."""
        cycles = sum(self.depths.values())
        forward_s = sum(self.forward_s[depth] * count for depth, count in self.depths.items()) / cycles
        return max(0.0, 1 - forward_s / min(block.cycle_s for block in self.tested))


@click.command()
@click.option("--quick", is_flag=True, help="Fewer pairs, shorter blocks, three widths.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--head", "head_folder", type=click.Path(path_type=Path, exists=True), help="An attached head.")
@click.option("--depth", default=1, help="Most tokens drafted per row and cycle.")
@click.option("--fixed", is_flag=True, help="Always draft that many instead of choosing the depth by cycle.")
@click.option("--widths", default="", help="Rows, comma separated.")
def main(*, quick: bool, as_json: bool, head_folder: Path | None, depth: int, fixed: bool, widths: str) -> None:
    """Measure."""
    from mtplx_core.blas import load_blas

    blas = load_blas()
    bench = Bench(head_folder, depth=depth, is_fixed=fixed, pairs=3 if quick else 7, cycles=6 if quick else 16)
    chosen = [int(width) for width in widths.split(",")] if widths else [1, 4, 8] if quick else [1, 2, 4, 8, 16, 32]
    lines = [f"SmolLM2-135M float32, {blas}, prompts of {SHORTEST} to {LONGEST} tokens, {bench.describe()}"]
    rows: dict[str, dict[str, float]] = {}
    non_trunk: dict[str, float] = {}
    for width in chosen:
        greedy, sampled = bench.measure(width, 0.0), bench.measure(width, TEMPERATURE)
        for name, measured in (("greedy", greedy), ("sampled", sampled)):
            lines.append(_line(width, name, measured))
        rows[str(width)] = {
            "greedy": greedy.ratio.median,
            "sampled": sampled.ratio.median,
            "accepted": greedy.accepted(width),
        }
        if width in NON_TRUNK_WIDTHS:
            non_trunk[str(width)] = max(greedy.non_trunk(), sampled.non_trunk())
    report(lines, {"rows": rows, "non_trunk": non_trunk}, as_json=as_json)


class Bench:
    """The model, its head and the probe's costs, loaded once."""

    def __init__(self, head_folder: Path | None, *, depth: int, is_fixed: bool, pairs: int, cycles: int) -> None:
        from mtplx_core.fetch import default_cache_dir, default_model_dir
        from mtplx_core.loader import load_model
        from mtplx_core.mtp_lane import load_head

        folder = default_model_dir(default_cache_dir(os.environ))
        self._loaded = load_model(folder)
        self._head = load_head(head_folder, self._loaded) if head_folder is not None else None
        self._text = _text_ids(folder)
        self._depth = depth
        self._is_fixed = is_fixed
        self._pairs = pairs
        self._cycles = cycles

    def describe(self) -> str:
        drafts = "lookup" if self._head is None else f"lookup and head {self._head.name}"
        how = "always" if self._is_fixed else "at most"
        return f"{drafts}, depth {how} {self._depth}, {self._pairs} pairs of {self._cycles} cycles"

    def measure(self, width: int, temperature: float) -> Measured:
        import mlx.core as mx

        prompts = self._prompts(width)
        reference = GeneratorLane(self._loaded.model, prompts, temperature)
        tested = EngineLane(self, prompts, temperature)
        lanes: list[Lane] = [reference, tested]
        measured = Measured()
        for lane in lanes:
            _block(lane, self._cycles)  # warms up, and lets the depth policy see costs and acceptance
        before = tested.depths()
        for _ in range(self._pairs):
            measured.reference.append(_block(reference, self._cycles))
            measured.tested.append(_block(tested, self._cycles))
        measured.depths = {depth: count - before.get(depth, 0) for depth, count in tested.depths().items()}
        measured.forward_s = {depth: tested.forward_s(depth) for depth in measured.depths}
        reference.close()
        tested.close()
        mx.clear_cache()
        return measured

    def engine(self, width: int) -> Any:
        from mtplx_core.cost_table import assumed_costs
        from mtplx_core.depth import AdaptiveDepth, DepthPolicy, FixedDepth
        from mtplx_core.engine import Geometry
        from mtplx_core.mtp_batch import MtpBatchEngine, MtpOptions

        policy: DepthPolicy = FixedDepth(self._depth)
        if not self._is_fixed:
            policy = AdaptiveDepth(self._depth, assumed_costs(rows=width, depth=self._depth))
        geometry = Geometry(width, 4096, self._depth)
        return MtpBatchEngine(self._loaded, geometry, head=self._head, options=MtpOptions(policy=policy))

    def _prompts(self, width: int) -> list[tuple[int, ...]]:
        step = (LONGEST - SHORTEST) / max(width - 1, 1)
        lengths = [round(SHORTEST + step * row) for row in range(width)] if width > 1 else [LONGEST // 3]
        starts = [(row * 97) % (len(self._text) - LONGEST) for row in range(width)]
        return [self._text[start : start + length] for start, length in zip(starts, lengths, strict=True)]


class GeneratorLane:
    """mlx-lm's batch generator with one shared sampler object."""

    def __init__(self, model: Any, prompts: Sequence[tuple[int, ...]], temperature: float) -> None:
        from mlx_lm.generate import BatchGenerator
        from mlx_lm.sample_utils import make_sampler

        self._generator: Any = BatchGenerator(
            model, max_tokens=100_000, sampler=make_sampler(temp=temperature), completion_batch_size=len(prompts)
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
    """The MTP lane's engine."""

    def __init__(self, bench: Bench, prompts: Sequence[tuple[int, ...]], temperature: float) -> None:
        from mtplx_core.engine import Row, Sampling

        self._engine = bench.engine(len(prompts))
        self._width = len(prompts)
        self._longest = max(map(len, prompts))
        self._tokens = 0
        for seed, prompt in enumerate(prompts):
            sampling = Sampling(temperature=temperature, seed=seed)
            self._engine.admit(Row(f"r{seed}", prompt, 4096 - len(prompt), sampling, ignore_eos=True))
        while self._engine.snapshot()["prefill_rows"]:
            self.cycle()

    def cycle(self) -> int:
        tokens = sum(len(part.tokens) for part in self._engine.step().tokens)
        self._tokens += tokens
        return tokens

    def depths(self) -> dict[int, int]:
        return {int(depth): count for depth, count in self._engine.snapshot()["cycles_by_depth"].items()}

    def forward_s(self, depth: int) -> float:
        from mtplx_core.probe import time_forward

        attended = self._longest + self._tokens // self._width
        trunk = self._engine.trunk
        return time_forward(
            trunk, rows=self._width, positions=depth + 1, clock=time.perf_counter, attended=attended, repeats=9
        )

    def close(self) -> None:
        self._engine.close()


def _block(lane: Lane, cycles: int) -> Block:
    """Time some cycles up to the moment the device is done with them."""
    import mlx.core as mx

    started = time.perf_counter()
    tokens = sum(lane.cycle() for _ in range(cycles))
    mx.synchronize()
    return Block(time.perf_counter() - started, tokens, cycles)


def _line(width: int, name: str, measured: Measured) -> str:
    ratio, accepted = measured.ratio, measured.accepted(width)
    allowed = measured.allowed(width)
    plain_ms = 1e3 * median([block.cycle_s for block in measured.reference])
    cycle_ms = 1e3 * median([block.cycle_s for block in measured.tested])
    depths = " ".join(f"{depth}:{count}" for depth, count in sorted(measured.depths.items()))
    return (
        f"{width:3d} rows, {name:8s} {ratio}  accepted {accepted:.2f}  of what the forward allows "
        f"{ratio.median / allowed:.3f}  non-trunk {measured.non_trunk():.3f}  plain {plain_ms:.0f} ms, "
        f"cycle {cycle_ms:.0f} ms  cycles by depth {depths}"
    )


def _text_ids(folder: Path) -> tuple[int, ...]:
    """A few thousand tokens of plain English, in the order of the benchmark's prompts."""
    from transformers import AutoTokenizer

    from benchmarks.clients import PROMPTS

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids: list[int] = []
    while len(ids) < 4 * LONGEST:
        for prompt in PROMPTS:
            ids += tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
            )
    return tuple(ids)


if __name__ == "__main__":
    main()
