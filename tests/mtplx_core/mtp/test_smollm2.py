"""The MTP lane on a real model: rows join and leave at random and every answer is audited. Runs on SmolLM2."""

from __future__ import annotations

import numpy as np
import pytest

from harness.chat_prompts import chat_prompt
from mtplx_core.build import build_engine
from mtplx_core.engine import Geometry, Row, SamplingParams, SchedulerMode
from mtplx_core.models.loader import LoadedModel
from mtplx_core.sampling.audit import audit
from tests.mtplx_core.driving import run

GEOMETRY = Geometry(decode_batch_max=4, max_context_tokens=512, depth=2, prefill_chunk_tokens=64)
QUESTIONS = (
    "Say hello three times.",
    "Repeat after me: the quick brown fox jumps over the lazy dog, the quick brown fox jumps over the lazy dog.",
    "What is the capital of France?",
    "Write a haiku about rain. " * 6,
)
SAMPLED = SamplingParams(0.8, top_p=0.95, frequency_penalty=0.2)


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_answers_pass_the_audit_while_rows_join_and_leave_at_random(
    smollm2: LoadedModel, sampling: SamplingParams
) -> None:
    rng = np.random.default_rng(5)
    rows = [
        Row(f"r{index}", chat_prompt(smollm2, question), int(rng.integers(5, 11)), sampling, ignore_eos=True)
        for index, question in enumerate(QUESTIONS)
    ]
    engine = build_engine(SchedulerMode.MTP_BATCH, smollm2, geometry=GEOMETRY)
    late = list(rows[1:])

    def join(step: int) -> None:
        # Where nothing is left to step, the next one joins for certain.
        if late and (engine.active_rows == 0 or rng.random() < 0.3):
            engine.admit(late.pop(0))

    heard = run(engine, rows[:1], before_step=join)

    assert heard.ends.keys() == {row.row_id for row in rows}
    for row in rows:
        result = audit(smollm2.model, row.prompt, heard.tokens[row.row_id], row.sampling)
        assert result.passed, (row.row_id, result)
