"""First messages that several prompts share. Runs on a tiny random llama, with and without a head."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.models import tiny_llama
from mtplx_core.engine import Geometry, Row, SamplingParams
from mtplx_core.heads.attached import AttachedHead
from mtplx_core.models.loader import LoadedModel
from mtplx_core.mtp.depth import FixedDepth
from mtplx_core.mtp.engine import MtpBatchEngine, MtpOptions
from mtplx_core.mtp.prefix_cache import KEPT, first_message
from mtplx_core.sampling.audit import audit
from tests.mtplx_core.driving import Heard, run
from tests.mtplx_core.mtp.conftest import random_head

END = 2
SYSTEM = (*range(40, 60), END)
GEOMETRY = Geometry(decode_batch_max=2, max_context_tokens=256, depth=2, prefill_chunk_tokens=32)
SAMPLED = SamplingParams(temperature=0.9, seed=4)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return replace(tiny_llama(), eos_token_ids=frozenset({END}))


@pytest.fixture(scope="module")
def head(loaded: LoadedModel) -> AttachedHead:
    return random_head(loaded)


def asking(name: str, *words: int, system: tuple[int, ...] = SYSTEM) -> Row:
    return Row(name, (*system, *words, END, 7), 12, SAMPLED, ignore_eos=True, top_logprobs=2)


def engine_of(loaded: LoadedModel, head: AttachedHead | None) -> MtpBatchEngine:
    """Drafts to one depth: a depth chosen by time gives products of other shapes, and those other last bits."""
    return MtpBatchEngine(loaded, GEOMETRY, head=head, options=MtpOptions(policy=FixedDepth(GEOMETRY.depth)))


def alone(loaded: LoadedModel, head: AttachedHead | None, row: Row) -> Heard:
    return run(engine_of(loaded, head), [row])


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        (SYSTEM + (5, 6, END, 7), 21),
        (SYSTEM, 0),
        (SYSTEM + (5, 6, 7), 0),
        ((5, END, 6, END), 0),
        (tuple(range(40, 80)) + (END, 5, END), 0),
        ((), 0),
    ],
    ids=["two messages", "one message", "an open second", "too short", "longer than a chunk", "empty"],
)
def test_first_message_is_found_in_the_prompt_alone(prompt: tuple[int, ...], tokens: int) -> None:
    assert first_message(prompt, {END}, most=32) == tokens


@pytest.mark.parametrize("has_head", [False, True], ids=["lookup", "head"])
def test_row_is_bit_equal_with_a_beginning_taken_over_and_fed(
    loaded: LoadedModel, head: AttachedHead, has_head: bool
) -> None:
    drafter = head if has_head else None
    engine = engine_of(loaded, drafter)
    rows = [asking("first", 11, 12, 13), asking("second", 90, 91), asking("third")]

    for row in rows:
        heard, expected = run(engine, [row]), alone(loaded, drafter, row)

        assert heard.tokens == expected.tokens
        assert heard.logprobs == expected.logprobs
        assert audit(loaded.model, row.prompt, heard.tokens[row.row_id], row.sampling).passed

    assert engine.snapshot()["shared_tokens"] == 2 * len(SYSTEM)
    assert engine.snapshot()["prefill_tokens"] == sum(len(row.prompt) - 1 for row in rows) - 2 * len(SYSTEM)


def test_rows_that_arrive_together_feed_their_beginning_once(loaded: LoadedModel) -> None:
    engine = MtpBatchEngine(loaded, GEOMETRY)

    heard = run(engine, [asking("a", 11), asking("b", 12)])

    assert engine.snapshot()["shared_tokens"] == len(SYSTEM)
    for name in "ab":
        done = [progress.done for progress in heard.prefill if progress.row_id == name]
        assert done[-1] == len(SYSTEM) + 3
    assert heard.ends.keys() == {"a", "b"}


def test_beginnings_that_nobody_asked_for_lately_are_dropped(loaded: LoadedModel) -> None:
    engine = MtpBatchEngine(loaded, GEOMETRY)
    systems = [(*range(start, start + 10), END) for start in range(10, 10 + 10 * (KEPT + 1), 10)]

    for number, system in enumerate([*systems, systems[-1], systems[0]]):
        run(engine, [asking(str(number), 5, system=system)])

    assert engine.snapshot()["shared_tokens"] == 11
