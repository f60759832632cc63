"""The engines and rows that engine tests share."""

from __future__ import annotations

from collections.abc import Callable

from mtplx_core.engine import Engine, Geometry, Profile, Row, SamplingParams, SchedulerMode

GEOMETRY = Geometry(decode_batch_max=6, max_context_tokens=256, depth=2, prefill_chunk_tokens=16)
KINDS: dict[str, tuple[SchedulerMode, Profile]] = {
    "serial": (SchedulerMode.SERIAL, Profile.BALANCED),
    "ar_batch": (SchedulerMode.AR_BATCH, Profile.BALANCED),
    "b1_exact": (SchedulerMode.AR_BATCH, Profile.B1_EXACT),
    "mtp_batch": (SchedulerMode.MTP_BATCH, Profile.BALANCED),
}
BATCHED = [name for name in KINDS if name != "serial"]

SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=77)
NEIGHBOURS = [
    Row("n0", tuple(range(40, 45)), 20),
    Row("n1", tuple(range(90, 160)), 30, SamplingParams(temperature=1.35, top_p=0.55, top_k=7, seed=7)),
    Row("n2", (5,), 12, SamplingParams(frequency_penalty=1.5, repetition_penalty=1.3)),
    Row("n3", tuple(range(10, 60)), 24, SamplingParams(temperature=2.0, seed=1, logit_bias=((9, 5.0),))),
]
ROWS = {
    "greedy": Row("row", (10, 20, 30), 24, ignore_eos=True),
    "sampled": Row("row", (10, 20, 30), 24, SAMPLED, ignore_eos=True),
    "long prompt": Row("row", tuple(range(4, 104)), 24, SAMPLED, ignore_eos=True),
    "penalties that must not count the prompt": Row(
        "row", tuple(range(4, 204)), 24, SamplingParams(0.7, frequency_penalty=0.6, presence_penalty=0.8, seed=5)
    ),
    "penalties": Row("row", (10, 20, 30), 24, SamplingParams(0.7, 1.0, 0, 0.02, 1.2, 0.3, 0.4, ((9, 1.0),), 2**63 + 5)),
}

Build = Callable[..., Engine]
