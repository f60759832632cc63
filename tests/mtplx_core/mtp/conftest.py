"""A tiny random llama, and a random head for it. Nothing here is ever right, so every path is taken."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from harness.models import VOCAB_SIZE, tiny_llama
from mtplx_core.heads.attached import AttachedHead
from mtplx_core.models.loader import LoadedModel
from mtplx_core.models.trunk import Trunk


def random_head(loaded: LoadedModel, *, seed: int = 3) -> AttachedHead:
    head = AttachedHead(Trunk(loaded.model), list(range(4, VOCAB_SIZE)), max_depth=3)
    keys = iter(mx.random.split(mx.random.key(seed), 64))
    head.update(tree_map(lambda a: mx.random.normal(a.shape, key=next(keys)) * 0.2, head.parameters()))
    mx.eval(head.parameters())
    return head


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_llama()


@pytest.fixture(scope="module")
def head(loaded: LoadedModel) -> AttachedHead:
    return random_head(loaded)
