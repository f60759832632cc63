"""The fetched model answers, and answers alike on every engine. Engines: serial, ar_batch on SmolLM2."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from tokenizers import Tokenizer

from harness.chat_prompts import chat_prompt
from mtplx_core.build import build_engine
from mtplx_core.engine import Geometry, Row, SamplingParams, SchedulerMode
from mtplx_core.models.loader import LoadedModel
from mtplx_core.sampling.audit import audit, compare
from tests.mtplx_core.driving import run

GEOMETRY = Geometry(decode_batch_max=4, max_context_tokens=256, prefill_chunk_tokens=128)
QUESTION = "What is the capital of France?"

ENCODINGS = {
    "digits": ("The year 2024 had 366 days.", [504, 713, 216, 34, 32, 34, 36, 761, 216, 35, 38, 38, 2009, 30]),
    "whitespace": ("  two  spaces\n\n\tand a tab", [216, 827, 216, 5600, 1116, 197, 397, 253, 10147]),
    "code": (
        "def add(a, b):\n    return a + b\n",
        [1604, 803, 24, 81, 28, 278, 727, 472, 1003, 253, 1232, 278, 198],
    ),
    "unicode": (
        "naïve café — 東京 😀",
        [3546, 46494, 37366, 1841, 17097, 247, 126, 16736, 122, 40303, 218],
    ),
    "other numerals": ("it's 3.14½", [269, 506, 216, 35, 30, 33, 36, 16738]),
    "special tokens": ("<|im_start|>user\nHi<|im_end|>\n", [1, 4093, 198, 26843, 2, 198]),
}


@pytest.fixture
def tokenizer(smollm2: LoadedModel) -> Tokenizer:
    return Tokenizer.from_str(smollm2.tokenizer_files["tokenizer.json"].decode())


@pytest.mark.parametrize(("text", "ids"), ENCODINGS.values(), ids=ENCODINGS.keys())
def test_tokenizer_encodes_as_the_original_does(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    assert tokenizer.encode(text, add_special_tokens=False).ids == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_model_knows_its_own_bounds(smollm2: LoadedModel) -> None:
    assert smollm2.name == "smollm2-135m"
    assert smollm2.vocab_size == 49152
    assert smollm2.max_context == 8192
    assert smollm2.eos_token_ids == {2}


def test_greedy_answer_to_the_capital_of_france_is_paris(smollm2: LoadedModel, tokenizer: Tokenizer) -> None:
    engine = build_engine(SchedulerMode.SERIAL, smollm2, geometry=GEOMETRY)

    heard = run(engine, [Row("row", chat_prompt(smollm2, QUESTION), 16)])

    assert tokenizer.decode(heard.tokens["row"]).startswith("The capital of France is Paris.")
    assert heard.ends["row"].reason == "stop"


def test_seeded_answers_are_the_samplers_alone_and_among_neighbours(smollm2: LoadedModel, tokenizer: Tokenizer) -> None:
    prompt = chat_prompt(smollm2, "Tell me a story about a fox.")
    row = Row("row", prompt, 8, SamplingParams(temperature=0.8, top_p=0.95, frequency_penalty=0.2, seed=2**40 + 5))
    others = [
        Row("greedy", chat_prompt(smollm2, QUESTION), 6),
        Row("wild", prompt[-12:], 9, SamplingParams(temperature=1.35, top_p=0.55, top_k=7, seed=7)),
    ]

    alone = run(build_engine(SchedulerMode.SERIAL, smollm2, geometry=GEOMETRY), [row]).tokens["row"]
    among = run(build_engine(SchedulerMode.AR_BATCH, smollm2, geometry=GEOMETRY), [others[0], row, *others[1:]])

    assert compare(smollm2.model, prompt, alone, among.tokens["row"], row.sampling).passed
    for each in [row, *others]:
        result = audit(smollm2.model, each.prompt, among.tokens[each.row_id], each.sampling)
        assert result.passed, (each.row_id, result)


def test_default_model_is_float32_where_there_is_no_metal(smollm2: LoadedModel) -> None:
    expected = mx.float16 if mx.metal.is_available() else mx.float32

    assert smollm2.dtype == expected
    assert isinstance(smollm2.path, Path)
