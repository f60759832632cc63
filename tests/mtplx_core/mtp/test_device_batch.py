"""What the batch leaves unevaluated behind its cycles. Runs on a tiny random llama with a random head."""

from __future__ import annotations

import io
from typing import Any

import mlx.core as mx
import pytest

from mtplx_core.engine import Geometry, Row
from mtplx_core.heads.attached import AttachedHead
from mtplx_core.models.loader import LoadedModel
from mtplx_core.models.trunk import Trunk
from mtplx_core.mtp.device_batch import CyclePlan, DeviceBatch
from mtplx_core.mtp.prefill import Prefill

GEOMETRY = Geometry(decode_batch_max=2, max_context_tokens=400, depth=3, prefill_chunk_tokens=16)
PROMPT = tuple(range(40, 48)) * 3
CYCLES = 80


def operations_behind(arrays: list[mx.array]) -> int:
    """Operations that evaluating these arrays would run."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    return graph.getvalue().count("label =")


def batch_of(loaded: LoadedModel, head: AttachedHead, *, overlaps: bool) -> tuple[DeviceBatch, int]:
    """A batch with two rows, and the tokens that each has."""
    trunk = Trunk(loaded.model)
    batch = DeviceBatch(trunk, GEOMETRY, head, overlaps=overlaps)
    for slot in range(2):
        prefill = Prefill(trunk, head, Row(f"r{slot}", PROMPT, 300), chunk_tokens=64)
        prefill.feed()
        batch.seat(slot, prefill)
    return batch, len(PROMPT)


@pytest.mark.parametrize("overlaps", [True, False], ids=["overlapped", "in-turn"])
@pytest.mark.parametrize("depth", [0, 3], ids=["plain", "lookup drafts for all"])
def test_cycles_in_which_the_head_does_not_draft_leave_no_growing_graph_behind_it(
    loaded: LoadedModel, head: AttachedHead, depth: int, overlaps: bool
) -> None:
    batch, tokens = batch_of(loaded, head, overlaps=overlaps)
    left: list[int] = []

    for _ in range(CYCLES):
        tokens += depth + 1
        guesses = None if overlaps else {slot: (5, 6, 7) for slot in range(2)}
        plan = CyclePlan(depth, (tokens, tokens), head_depth=0, by_lookup=frozenset(range(2)), guesses=guesses)
        started = batch.start(plan)
        left.append(operations_behind(batch.arrays))
        chosen: Any = started.chosen.tolist()
        if not overlaps:
            batch.settle(chosen, [depth + 1] * 2)
    most = operations_behind(batch.arrays)

    assert left == [0] * CYCLES
    assert most < 100
