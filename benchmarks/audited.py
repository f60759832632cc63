"""Every token of many answers checked: rows of mixed length that join and leave at random, depth chosen as it pays.

`python -m benchmarks.audited [--quick] [--json] [--only greedy] [--prompts 64] [--tokens 32] [--model FOLDER]
[--head FOLDER] [--no-serial]`. Each answer is re-derived token by token from one plain forward, and held against what
the serial engine says. Two may part where two tokens tie; such ties are counted. Ends with status 1 if anything else
differs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from benchmarks.lanes import LONGEST, SHORTEST
from benchmarks.prompts import PromptWriter
from benchmarks.ratios import report

LEAVING_SHARE = 0.15
"""Rows whose client goes away before the end."""
CONTEXT = 1024
"""Tokens of a row at least."""


class Outcome(NamedTuple):
    """What one way of sampling came to."""

    rows: int
    left_early: int
    tokens: int
    ties: int
    """Tokens that are not the top one and within rounding of it."""
    wrong: int
    """Tokens that are not the top one beyond rounding."""
    equal_to_serial: int
    part_at_tie: int
    part_otherwise: int
    tokens_per_row_and_cycle: float
    cycles_by_depth: dict[str, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is decoded."""

    prompts: int
    tokens: int
    width: int
    has_serial: bool


@click.command()
@click.option("--quick", is_flag=True, help="Eight prompts, twelve tokens each.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--only", type=click.Choice(["greedy", "sampled"]))
@click.option("--prompts", default=64, show_default=True)
@click.option("--tokens", default=32, show_default=True, help="Of each answer.")
@click.option("--rows", "width", default=8, show_default=True)
@click.option("--model", "model_folder", type=click.Path(path_type=Path), help="Else the default model.")
@click.option("--head", "head_folder", type=click.Path(path_type=Path), help="Else the shipped one.")
@click.option(
    "--serial/--no-serial", "has_serial", default=True, help="Whether to hold answers against the serial engine."
)
def main(
    *,
    quick: bool,
    as_json: bool,
    only: str | None,
    prompts: int,
    tokens: int,
    width: int,
    model_folder: Path | None,
    head_folder: Path | None,
    has_serial: bool,
) -> None:
    """Check."""
    from mtplx_core.blas import load_blas

    load_blas()
    plan = Plan(8, 12, 4, has_serial) if quick else Plan(prompts, tokens, width, has_serial)
    check = Check(plan, model_folder, head_folder)
    outcomes = {name: check.run(name) for name in ([only] if only else ["greedy", "sampled"])}
    lines = [f"{name:8s} {outcome}" for name, outcome in outcomes.items()]
    report(lines, {name: outcome._asdict() for name, outcome in outcomes.items()}, as_json=as_json)
    if any(outcome.wrong or outcome.part_otherwise for outcome in outcomes.values()):
        sys.exit(1)


class Check:
    """The model, its head and the prompts."""

    def __init__(self, plan: Plan, model_folder: Path | None, head_folder: Path | None) -> None:
        from mtplx_core.models.fetch import default_cache_dir, default_model_dir
        from mtplx_core.models.loader import load_model
        from mtplx_core.mtp.assemble import find_head

        folder = model_folder or default_model_dir(default_cache_dir(os.environ))
        self._plan = plan
        self._loaded = load_model(folder)
        self._head = find_head(head_folder, self._loaded)
        self._context = max(CONTEXT, LONGEST + plan.tokens + 1)
        self._writer = PromptWriter(folder)

    def run(self, name: str) -> Outcome:
        from mtplx_core.sampling.audit import audit, compare

        rows = self._rows(is_greedy=name == "greedy")
        told, left_early, counters = self._decode(rows)
        serial = self._decode_serially(rows) if self._plan.has_serial else {}
        model, ties, wrong = self._loaded.model, 0, 0
        parted = {"equal": 0, "tie": 0, "otherwise": 0}
        for row in rows:
            answer = told[row.row_id]
            checked = audit(model, row.prompt, answer, row.sampling)
            missed = sum(not mismatch.gap < checked.tolerance for mismatch in checked.mismatches)
            wrong += missed
            ties += len(checked.mismatches) - missed
            if serial:
                compared = compare(model, row.prompt, answer, serial[row.row_id][: len(answer)], row.sampling)
                same = compared.first_difference is None
                parted["equal" if same else "tie" if compared.passed else "otherwise"] += 1
        return Outcome(
            rows=len(rows),
            left_early=left_early,
            tokens=sum(map(len, told.values())),
            ties=ties,
            wrong=wrong,
            equal_to_serial=parted["equal"],
            part_at_tie=parted["tie"],
            part_otherwise=parted["otherwise"],
            tokens_per_row_and_cycle=round(1 + sum(counters["accepted_by_place"]) / max(counters["row_cycles"], 1), 3),
            cycles_by_depth=counters["cycles_by_depth"],
        )

    def _rows(self, *, is_greedy: bool) -> list[Any]:
        from mtplx_core.engine import Row, SamplingParams

        rng = np.random.default_rng(1)
        rows = []
        for number in range(self._plan.prompts):
            prompt = self._writer.write(number, tokens=int(rng.integers(SHORTEST, LONGEST)))
            sampling = (
                SamplingParams() if is_greedy else SamplingParams(0.8, top_p=0.95, frequency_penalty=0.1, seed=number)
            )
            rows.append(Row(f"r{number}", prompt, self._plan.tokens, sampling, ignore_eos=True))
        return rows

    def _decode(self, rows: Sequence[Any]) -> tuple[dict[str, list[int]], int, dict[str, Any]]:
        """Answers by the MTP lane, how many rows were dropped on the way, and the engine's counters."""
        from mtplx_core.engine import Geometry
        from mtplx_core.models.trunk import Trunk
        from mtplx_core.mtp.assemble import build_mtp_engine, usual_depth

        rng = np.random.default_rng(2)
        geometry = Geometry(self._plan.width, self._context, usual_depth(Trunk(self._loaded.model)))
        engine = build_mtp_engine(self._loaded, geometry, head=self._head)
        waiting, told, left_early, row_cycles = list(rows), {row.row_id: list[int]() for row in rows}, 0, 0
        here: set[str] = set()
        while waiting or engine.active_rows:
            while waiting and len(here) < self._plan.width and (not here or rng.random() < 0.4):
                here.add(waiting[0].row_id)
                engine.admit(waiting.pop(0))
            if here and rng.random() < LEAVING_SHARE / self._plan.tokens * len(here):
                gone = sorted(here)[int(rng.integers(len(here)))]
                engine.discard(gone)
                here.discard(gone)
                left_early += 1
            result = engine.step()
            row_cycles += len(result.tokens)
            for part in result.tokens:
                told[part.row_id] += part.tokens
            here -= {end.row_id for end in result.ends}
        counters = {**engine.snapshot(), "row_cycles": row_cycles}
        engine.close()
        return told, left_early, counters

    def _decode_serially(self, rows: Sequence[Any]) -> dict[str, list[int]]:
        from mtplx_core.engine import Geometry
        from mtplx_core.engines.serial import SerialEngine

        engine = SerialEngine(self._loaded, Geometry(1, self._context))
        told: dict[str, list[int]] = {row.row_id: [] for row in rows}
        for row in rows:
            engine.admit(row)
            while engine.active_rows:
                for part in engine.step().tokens:
                    told[part.row_id] += part.tokens
        return told


if __name__ == "__main__":
    main()
