"""A stop string that is complete inside one multi-token step. Runs on SmolLM2, drafting by prompt lookup; no Redis."""

from __future__ import annotations

from broker.text.token_bytes import byte_table, text_of
from broker.wire import Assignment, Finished, Request, Sampling, pack_tokens
from harness.chat_prompts import chat_prompt
from mtplx_core.engine import Geometry
from mtplx_core.models.loader import LoadedModel
from mtplx_core.mtp.depth import FixedDepth
from mtplx_core.mtp.engine import MtpBatchEngine, MtpOptions
from workers.row_table import RowTable
from workers.running_row import ActiveRow
from workers.stop_detection import StopDetector

SAYING = "Repeat this sentence three times: The quick brown fox jumps over the lazy dog."
STOP = b"own fox"


def test_row_stopped_inside_a_multi_token_step_keeps_nothing_behind_it(smollm2: LoadedModel) -> None:
    table = byte_table(smollm2.tokenizer_files["tokenizer.json"]) or ()
    prompt = chat_prompt(smollm2, SAYING)
    request = Request("a", "smollm2", "balanced", pack_tokens(prompt), 40, Sampling(temperature=0.0), stop=(STOP,))
    text = StopDetector(table, stops=(STOP,), ending=smollm2.eos_token_ids)
    row = ActiveRow(Assignment("a", 1), request, prompt, seed=0, reply="", text=text, is_submitted=True)
    rows = RowTable()
    rows.add(row)
    engine = MtpBatchEngine(smollm2, Geometry(1, 256, depth=3), options=MtpOptions(policy=FixedDepth(3)))
    engine.admit(row.engine_row())

    last: tuple[int, ...] = ()
    while row.is_running:
        result = engine.step()
        last = result.tokens[0].tokens if result.tokens else last
        for ended in rows.take_step(result):
            engine.discard(ended.id)
    engine.step()

    assert row.finish is not None
    assert isinstance(row.finish.event, Finished)
    answer = text_of(table, row.engine_row().committed)
    assert answer[: row.finish.event.text_end].endswith(b"The quick br")
    assert answer.endswith(STOP)
    assert len(last) > 1
    assert not answer.endswith(text_of(table, last))
    assert row.finish.event.reason == "stop"
    assert row.finish.event.stats.accepted[0] > 0
    assert (engine.active_rows, engine.snapshot()["kv_bytes"]) == (0, 0)
