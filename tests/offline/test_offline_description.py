"""The description of Files and Batches, kept and broken, thrown at a real server. Engine: scripted, in a process."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
import schemathesis.specs.openapi.schemas  # here, since Python 3.11 may not parse modules on two threads at once
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from harness.stack import Stack

CONFORMANCE = [status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["kept", "broken"])
def test_offline_routes_never_fail_in_the_server(offline_stack: Stack, mode: GenerationMode) -> None:
    description = schemathesis.openapi.from_url(f"{offline_stack.url}/openapi.json")
    operations = [found.ok() for found in description.get_all_operations() if isinstance(found, Ok)]
    offline = [each for each in operations if each.path.startswith(("/v1/files", "/v1/batches"))]
    assert len(offline) == 9

    for operation in offline:
        throw(operation, mode)


def throw(operation: Any, mode: GenerationMode) -> None:
    @EXAMPLES
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        response = case.call(timeout=30)
        assert response.status_code < 500, response.text
        if mode is GenerationMode.POSITIVE:
            case.validate_response(response, checks=CONFORMANCE)
        if response.status_code >= 400:
            assert set(response.json()) == {"error"}

    run()
