"""Workers on tiny checkpoints of families that are easily served wrong: exact log-probabilities, or one sentence.

Real processes, real loader. Engines: the ones the workers choose.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from harness.families.checkpoints import write_checkpoint
from harness.stack import READY_S, Stack, wait_until
from mtplx_core.models.loader import load_model
from tests.console.processes import are_gone, children_of
from tests.console.test_up import Up

SERVED = ("granite", "gemma2", "minimax", "gpt_oss")
REFUSED = "phi3small"
"""mlx-lm adds its mask to the scores as a number, so prompts are not causal and no two ways of running it agree."""
PROMPTS = ([10, 20, 30], list(range(40, 59)), [70, 71, 72, 73, 70, 71])
ANSWER_TOKENS = 12
_WORKER = ("--max-context-tokens", "64", "--decode-batch-max", "4", "--depth", "3")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mtplx-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[Stack]:
    """A worker for each family, beside one former and one API process."""
    with Stack(workers=0) as stack:
        for family in SERVED:
            model = write_checkpoint(folder / family, family)
            stack.arguments["worker"] = ("--model", str(model), "--cache-dir", str(folder / "cache"), *_WORKER)
            stack.start_one(f"worker-{family}")
        wait_until(
            lambda: stack.is_ready() and stack.accepting_workers() == len(SERVED),
            "a worker serves each family",
            timeout_s=READY_S,
            on_timeout=stack.logs,
        )
        yield stack


@pytest.mark.parametrize("family", SERVED)
def test_served_family_answers_with_its_models_own_logprobs(family: str, fleet: Stack, folder: Path) -> None:
    body = {
        "model": family,
        "prompt": PROMPTS,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "logprobs": 0,
        "ignore_eos": True,
    }

    reply = httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=60)

    assert reply.status_code == 200, reply.text
    model = load_model(folder / family).model
    for prompt, choice in zip(PROMPTS, sorted(reply.json()["choices"], key=lambda c: c["index"]), strict=True):
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(greedy_logprobs(model, prompt), abs=1e-3)


def test_family_that_no_mode_runs_ends_up_with_one_sentence(folder: Path) -> None:
    model = write_checkpoint(folder / REFUSED, REFUSED)

    up = Up(folder / "data", "--engine", "mlx", "--model", str(model))

    try:
        assert up.process.wait(READY_S) == 1
    finally:
        up.process.kill()
    assert are_gone(children_of(up.process.pid))
    assert up.log.count(f"mtplx: {REFUSED} runs in no scheduler mode here") == 1
    assert "starting it again" not in up.log


def greedy_logprobs(model: Any, prompt: Sequence[int]) -> list[float]:
    """mlx-lm's own, one forward over everything for each token."""
    tokens, found = list(prompt), list[float]()
    for _ in range(ANSWER_TOKENS):
        logits = model(mx.array([tokens]), cache=make_prompt_cache(model))[0, -1]
        logprobs = logits - mx.logsumexp(logits)
        token: Any = mx.argmax(logits).item()
        tokens.append(token)
        found.append(float(logprobs[token].item()))
    return found
