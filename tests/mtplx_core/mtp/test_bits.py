"""Which bits are equal on `mtp_batch`: those of a row in its slot, in forwards of the same shape. Tiny random llama.

A product may round a row by its place and by the shape of the whole, so everything else is compared by the audit.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtplx_core.engine import Row, SamplingParams
from mtplx_core.heads.attached import AttachedHead
from mtplx_core.models.loader import LoadedModel
from mtplx_core.mtp.depth import FixedDepth
from mtplx_core.mtp.engine import MtpBatchEngine, MtpOptions
from mtplx_core.sampling.audit import audit
from tests.mtplx_core.driving import Heard, assert_same_answer, run
from tests.mtplx_core.mtp.test_engine import GEOMETRY, SAMPLED, rows_of

ORDERS = pytest.mark.parametrize("overlaps", [True, False], ids=["overlapped", "in-turn"])


def engine_of(
    loaded: LoadedModel, depth: int, *, head: AttachedHead, overlaps: bool, keeps_width: bool = False
) -> MtpBatchEngine:
    options = MtpOptions(policy=FixedDepth(depth), keeps_width=keeps_width, overlaps=overlaps)
    return MtpBatchEngine(loaded, GEOMETRY, head=head, options=options)


@ORDERS
def test_rows_are_bit_equal_whatever_the_neighbours_say_and_when_they_leave(
    loaded: LoadedModel, head: AttachedHead, *, overlaps: bool
) -> None:
    row = Row("row", (10, 20, 30), 60, replace(SAMPLED, seed=1), top_logprobs=2, ignore_eos=True)

    def beside(*neighbours: Row, leave_at: int) -> Heard:
        engine = engine_of(loaded, 1, head=head, overlaps=overlaps, keeps_width=True)

        def leave(step: int) -> None:
            if step == leave_at:
                engine.discard("n1")

        return run(engine, [row, *neighbours], before_step=leave)

    one = beside(Row("n1", (5,) * 9, 50), Row("n2", (7,) * 9, 60, ignore_eos=True), leave_at=5)
    other = beside(
        Row("n1", tuple(range(50, 59)), 50, SamplingParams(temperature=1.7, top_k=9, seed=8)),
        Row("n2", tuple(range(90, 99)), 60, SamplingParams(frequency_penalty=1.0), ignore_eos=True),
        leave_at=31,
    )

    assert one.tokens["row"] == other.tokens["row"]
    assert one.logprobs["row"] == other.logprobs["row"]


def rows_to_pause() -> list[Row]:
    rows = [replace(row, top_logprobs=2) for row in rows_of(sampling=SAMPLED)]
    return [replace(rows[0], sampling=SamplingParams(0.7, frequency_penalty=0.6, seed=5)), *rows[1:]]


@ORDERS
@pytest.mark.parametrize("depth", [0, 2])
def test_rows_are_bit_equal_after_pauses_that_bring_each_back_to_its_own_slot(
    loaded: LoadedModel, head: AttachedHead, depth: int, *, overlaps: bool
) -> None:
    rows = rows_to_pause()
    undisturbed = run(engine_of(loaded, depth, head=head, overlaps=overlaps), rows)
    engine = engine_of(loaded, depth, head=head, overlaps=overlaps)
    paused: list[str] = []

    def pause(step: int) -> None:
        """While every slot is taken, the only hole is the paused row's own."""
        shown = engine.snapshot()
        if step % 3 == 0 and engine.active_rows == shown["physical_rows"] == len(rows):
            paused.append(f"r{len(paused) % len(rows)}")
            engine.pause(paused[-1])
            engine.resume(paused[-1])

    heard = run(engine, rows, before_step=pause)

    assert len(set(paused)) > 1
    assert heard.tokens == undisturbed.tokens
    assert heard.logprobs == undisturbed.logprobs


@ORDERS
@pytest.mark.parametrize("depth", [0, 2])
def test_rows_say_the_same_after_pauses_in_which_they_changed_slots(
    loaded: LoadedModel, head: AttachedHead, depth: int, *, overlaps: bool
) -> None:
    """A product may round a row differently in another slot, so the last bits are free."""
    rows = rows_to_pause()
    undisturbed = run(engine_of(loaded, depth, head=head, overlaps=overlaps), rows)
    engine = engine_of(loaded, depth, head=head, overlaps=overlaps)

    def swap(step: int) -> None:
        """Each takes the slot that the other left."""
        if step % 5 == 3:
            for verb in (engine.pause, engine.resume):
                for name in ("r1", "r0"):
                    verb(name)

    heard = run(engine, rows, before_step=swap)

    for row in rows:
        assert_same_answer(loaded, row, heard, undisturbed)
        assert audit(loaded.model, row.prompt, heard.tokens[row.row_id], row.sampling).passed
