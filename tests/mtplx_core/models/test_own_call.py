"""A model's own call in halves. Engine: none; random models of several families."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mtplx_core.errors import ModelLoadError
from mtplx_core.models.own_call import OwnCall
from tests.mtplx_core.models.tiny import CONFIGS, VOCAB_SIZE, tiny_model

TOKENS = mx.array([[3, 14, 15, 92, 65], [35, 89, 79, 3, 23]])
WITH_A_BODY = [name for name in CONFIGS if name != "gpt_neox"]


def is_close(one: mx.array, other: mx.array) -> bool:
    return bool(mx.allclose(one, other, rtol=1e-4, atol=1e-4).item())


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_the_hidden_states_are_the_models_own(name: str) -> None:
    model = tiny_model(name).model
    own = model(TOKENS)
    call = OwnCall(model)

    said = call(TOKENS)

    assert is_close(said.logits, own)
    assert is_close(call.logits(said.hidden), own)
    assert (call.vocab_size, call.dtype) == (VOCAB_SIZE, mx.float32)


@pytest.mark.parametrize("name", WITH_A_BODY)
def test_logits_of_some_tokens_are_theirs_among_all(name: str) -> None:
    call = OwnCall(tiny_model(name).model)
    ids = mx.array([5, 0, VOCAB_SIZE - 1])
    said = call(TOKENS)

    assert is_close(call.logits_of(ids)(said.hidden), said.logits[:, :, ids])
    assert is_close(call(TOKENS).logits, said.logits), "the whole vocabulary is there again"


def test_hidden_states_have_the_models_width_where_it_has_a_body() -> None:
    assert OwnCall(tiny_model("granite").model).hidden_size == 64


def test_logits_stand_for_hidden_states_where_no_module_ends_in_them() -> None:
    call = OwnCall(tiny_model("gpt_neox").model)

    said = call(TOKENS)

    assert call.body is None
    assert said.hidden is said.logits
    with pytest.raises(ModelLoadError, match="output layer"):
        call.logits_of(mx.array([1]))


def test_second_entry_to_one_model_is_as_good_as_the_first() -> None:
    model = tiny_model("cohere").model
    first, second = OwnCall(model), OwnCall(model)

    assert is_close(first(TOKENS).logits, second.logits(second(TOKENS).hidden))
    assert first.body is second.body
