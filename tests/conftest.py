"""Set-up for the whole suite: the matrix product, before any test module imports MLX, and the one real model."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING

import pytest

from mtplx_core.blas import load_blas

if TYPE_CHECKING:
    from mtplx_core.models.loader import LoadedModel

load_blas()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that wait for real processes go first: begun last, they would be all that is left to run."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/system/"))


def pytest_collection_finish() -> None:
    """Leave modules and tests out of each garbage collection from here on; they stay until the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """SmolLM2-135M-Instruct out of the user's cache, fetched first where it is missing."""
    from mtplx_core.models.fetch import default_cache_dir, fetch_default_model
    from mtplx_core.models.loader import load_model

    cache_dir = default_cache_dir(os.environ)
    folder = fetch_default_model(cache_dir, on_progress=lambda progress: None)
    return load_model(folder, cache_dir=cache_dir)
