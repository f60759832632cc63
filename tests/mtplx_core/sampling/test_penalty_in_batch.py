"""A penalty does what it says, alone and among neighbours. Engines: all; model: tiny random llama."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from mtplx_core.engine import Row, SamplingParams
from mtplx_core.models.loader import LoadedModel
from mtplx_core.sampling.audit import compare
from tests.mtplx_core.driving import run
from tests.mtplx_core.engine_cases import KINDS, NEIGHBOURS, Build

PLAIN = Row("plain", (10, 20, 30), 60, SamplingParams(logit_bias=((9, 2.0), (11, 2.0))), ignore_eos=True)
PENALISED = replace(PLAIN, row_id="penalised", sampling=replace(PLAIN.sampling, frequency_penalty=1.5))


def most_repeated(tokens: list[int]) -> int:
    return max(Counter(tokens).values())


@pytest.mark.parametrize("kind", KINDS)
def test_penalised_row_repeats_itself_less(build: Build, kind: str) -> None:
    plain = run(build(kind), [PLAIN]).tokens["plain"]
    penalised = run(build(kind), [PENALISED]).tokens["penalised"]

    assert most_repeated(list(penalised)) * 2 < most_repeated(list(plain))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "serial"])
def test_penalty_of_one_row_is_not_felt_by_the_other(build: Build, loaded: LoadedModel, kind: str) -> None:
    alone = run(build(kind), [PLAIN]).tokens["plain"]

    together = run(build(kind), [PLAIN, PENALISED, NEIGHBOURS[0]]).tokens

    assert compare(loaded.model, PLAIN.prompt, alone, together["plain"], PLAIN.sampling).passed
    assert most_repeated(list(together["penalised"])) * 2 < most_repeated(list(together["plain"]))
