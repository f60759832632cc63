"""What the OpenAPI description allows, and what it does not, thrown at a real server. Engine: none (a fake queue)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import schemathesis
import schemathesis.specs.openapi.schemas  # here, since Python 3.11 may not parse modules on two threads at once
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from harness.wait import PATIENCE_S
from tests.api.fake import NAME, FakeBackend

pytestmark = pytest.mark.asyncio(loop_scope="session")

CONFORMANCE = [status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def throw(url: str, *, mode: GenerationMode) -> None:
    """Try the operations of the description with many bodies and parameters."""
    description = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for found in description.get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()
        if mode is GenerationMode.POSITIVE or operation.body:  # without a body there is little to get wrong
            try_one(operation.as_strategy(generation_mode=mode))


def try_one(cases: st.SearchStrategy[Any]) -> None:
    @EXAMPLES
    @given(case=cases)
    def run(case: Any) -> None:
        ask(case)

    run()


def ask(case: Any) -> None:
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = NAME  # else every call would end at the unknown model
    response = case.call(timeout=PATIENCE_S)
    assert response.status_code < 500, response.text
    case.validate_response(response, checks=CONFORMANCE)
    if response.status_code >= 400:
        assert set(response.json()) == {"error"}
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_described_calls_never_fail_in_the_server(url: str, backend: FakeBackend) -> None:
    await asyncio.to_thread(throw, url, mode=GenerationMode.POSITIVE)

    assert backend.submitted


async def test_calls_against_the_description_never_fail_in_the_server(url: str, backend: FakeBackend) -> None:
    await asyncio.to_thread(throw, url, mode=GenerationMode.NEGATIVE)
