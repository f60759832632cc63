"""A tiny llama that was really trained, and what the forge makes of it, once for all tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn
import mlx.optimizers
import numpy as np
import pytest
from mlx_lm.models.llama import Model, ModelArgs

from mtplx_core.build import build_engine
from mtplx_core.engine import Geometry, SchedulerMode
from mtplx_core.forge.answers import TrainingPrompt, collect_answers
from mtplx_core.forge.states import record_states
from mtplx_core.models.loader import LoadedModel
from mtplx_core.models.trunk import Trunk

nn: Any = mlx.nn
NUMBERS = 60
"""Tokens 4 to 4 + NUMBERS count upwards in strides; the others are never said."""
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 64,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def counting(draws: np.random.Generator, length: int) -> list[int]:
    """Numbers that count upwards in a stride that changes now and then."""
    number, stride, sequence = int(draws.integers(NUMBERS)), int(draws.integers(1, 4)), []
    for _ in range(length):
        if draws.random() < 0.05:
            stride = int(draws.integers(1, 4))
        number = (number + stride) % NUMBERS
        sequence.append(4 + number)
    return sequence


@pytest.fixture(scope="package")
def counter() -> LoadedModel:
    """A llama that has learnt to count."""
    mx.random.seed(0)
    model: Any = Model(ModelArgs.from_dict(CONFIG))  # type: ignore[no-untyped-call]  # mlx-lm annotates in part
    adam = mlx.optimizers.AdamW(learning_rate=3e-3)
    draws = np.random.default_rng(0)
    step = nn.value_and_grad(model, lambda batch: _next_token_loss(model, batch))
    for _ in range(150):
        batch = mx.array([counting(draws, 48) for _ in range(16)])
        _, gradients = step(batch)
        adam.update(model, gradients)
        mx.eval(model.parameters(), adam.state)
    model.eval()
    return LoadedModel(
        model=model,
        path=Path("/nonexistent/counter"),
        name="counter",
        identity="counter@000000000000",
        vocab_size=CONFIG["vocab_size"],
        eos_token_ids=frozenset({CONFIG["eos_token_id"]}),
        max_context=CONFIG["max_position_embeddings"],
        tokenizer_files={},
        config=CONFIG,
        dtype=mx.float32,
    )


@pytest.fixture(scope="package")
def prompts() -> list[TrainingPrompt]:
    draws = np.random.default_rng(1)
    return [TrainingPrompt(tuple(counting(draws, 6)), 0.0 if place % 2 else 0.8) for place in range(160)]


@pytest.fixture(scope="package")
def answers(counter: LoadedModel, prompts: list[TrainingPrompt], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forge") / "answers"
    geometry = Geometry(decode_batch_max=32, max_context_tokens=64)
    engine = build_engine(SchedulerMode.AR_BATCH, counter, geometry=geometry)
    collect_answers(engine, prompts, folder, max_tokens=40, on_progress=lambda done, total: None)
    engine.close()
    return folder


@pytest.fixture(scope="package")
def states(counter: LoadedModel, answers: Path) -> Path:
    folder = answers.parent / "states"
    record_states(Trunk(counter.model), answers, folder, on_progress=lambda done, total: None)
    return folder


def _next_token_loss(model: Any, batch: mx.array) -> mx.array:
    loss: mx.array = nn.losses.cross_entropy(model(batch[:, :-1]), batch[:, 1:], reduction="mean")
    return loss
