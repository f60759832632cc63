"""Engines for the tests of this folder: built on request, closed afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.models import tiny_llama
from mtplx_core.build import build_engine
from mtplx_core.engine import Engine, Geometry
from mtplx_core.models.loader import LoadedModel
from tests.mtplx_core.engine_cases import GEOMETRY, KINDS, Build


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_llama()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def build(loaded: LoadedModel) -> Iterator[Build]:
    made: list[Engine] = []

    def make(kind: str, *, model: LoadedModel | None = None, geometry: Geometry = GEOMETRY) -> Engine:
        mode, profile = KINDS[kind]
        made.append(build_engine(mode, model or loaded, geometry=geometry, profile=profile))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
        assert engine.active_rows == 0
