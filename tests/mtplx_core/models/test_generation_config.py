"""What a model's authors say of sampling, and what is made of files that say it badly. Engine: none."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from mtplx_core.models.generation_config import FILE_NAME, GenerationConfig, read_generation_config


def read(**said: Any) -> GenerationConfig:
    return read_generation_config({FILE_NAME: json.dumps(said).encode()})


def test_everything_that_is_said_is_taken() -> None:
    found = read(
        temperature=1, top_p=0.8, top_k=20, min_p=0.05, repetition_penalty=1.05, max_new_tokens=512, eos_token_id=[7, 9]
    )

    assert found == GenerationConfig(frozenset({7, 9}), 1.0, 0.8, 20, 0.05, 1.05, 512)
    assert isinstance(found.temperature, float)


def test_nothing_is_made_up_where_there_is_no_file() -> None:
    assert read_generation_config({}) == read() == GenerationConfig()


def test_do_sample_does_not_make_a_model_greedy() -> None:
    assert read(do_sample=False).temperature is None


@pytest.mark.parametrize(("said", "ids"), [(7, {7}), ([7, 8], {7, 8}), (None, set()), (-1, set()), (True, set())])
def test_end_tokens_are_one_or_several(said: object, ids: set[int]) -> None:
    assert read(eos_token_id=said).eos_token_ids == ids


@pytest.mark.parametrize("said", [0, -1])
def test_top_k_without_a_bound_is_none(said: int) -> None:
    assert read(top_k=said).top_k == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("temperature", 10**400),
        ("temperature", "0.7"),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("top_k", -2),
        ("top_k", True),
        ("min_p", -1),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("max_new_tokens", 2**40),
    ],
    ids=lambda value: str(value)[:12],
)
def test_value_that_cannot_be_used_is_passed_over_and_named(
    name: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = read(**{name: value, "top_p": 0.5} if name != "top_p" else {name: value})

    assert getattr(found, name) is None
    assert name in caplog.text


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"null"])
def test_file_that_is_no_object_says_nothing(content: bytes) -> None:
    assert read_generation_config({FILE_NAME: content}) == GenerationConfig()
