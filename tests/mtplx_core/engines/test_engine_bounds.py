"""What every engine refuses, and how it fails, on every engine as in test_engines. Model: tiny random llama."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.models import VOCAB_SIZE, tiny_llama
from mtplx_core.engine import Row, SamplingParams
from mtplx_core.errors import EngineDeadError, RowRejectedError
from mtplx_core.models.loader import LoadedModel
from mtplx_core.sampling.audit import audit
from tests.mtplx_core.driving import run
from tests.mtplx_core.engine_cases import NEIGHBOURS, ROWS, SAMPLED, Build

POISON = 200
BAD_ROWS = {
    "empty prompt": Row("bad", (), 5),
    "too long": Row("bad", (1,) * 250, 7),
    "token outside the vocabulary": Row("bad", (VOCAB_SIZE,), 5),
    "negative token": Row("bad", (-1,), 5),
    "committed outside the vocabulary": Row("bad", (1,), 5, committed=(VOCAB_SIZE,)),
    "bias outside the vocabulary": Row("bad", (1,), 5, SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),))),
    "no tokens wanted": Row("bad", (1,), 0),
    "more committed than wanted": Row("bad", (1,), 1, committed=(1, 2)),
}


@pytest.mark.parametrize("row", BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_row_that_breaks_a_bound_is_refused_and_nothing_is_kept(build: Build, kind: str, row: Row) -> None:
    engine = build(kind)

    with pytest.raises(RowRejectedError):
        engine.admit(row)

    assert engine.active_rows == 0


def test_row_that_just_fits_is_taken(build: Build, kind: str) -> None:
    heard = run(build(kind), [Row("row", (1,) * 250, 6, ignore_eos=True)])

    assert len(heard.tokens["row"]) == 6


def test_second_row_of_the_same_id_is_refused(build: Build, kind: str) -> None:
    engine = build(kind)
    engine.admit(ROWS["greedy"])

    with pytest.raises(RowRejectedError):
        engine.admit(ROWS["greedy"])


def test_more_rows_than_the_geometry_holds_are_refused(build: Build, kind: str) -> None:
    engine = build(kind)
    for index in range(engine.geometry.decode_batch_max):
        engine.admit(replace(ROWS["greedy"], row_id=str(index)))

    with pytest.raises(RowRejectedError):
        engine.admit(replace(ROWS["greedy"], row_id="one too many"))


def test_full_engine_takes_a_row_again_once_one_has_ended(build: Build, kind: str) -> None:
    engine = build(kind)
    count = engine.geometry.decode_batch_max
    run(engine, [replace(ROWS["greedy"], row_id=str(index), max_tokens=2) for index in range(count)])

    assert run(engine, [ROWS["greedy"]]).ends["row"].reason == "length"


def test_row_bytes_grow_no_smaller_with_length(build: Build, kind: str) -> None:
    engine = build(kind)

    assert 0 < engine.row_bytes(10) <= engine.row_bytes(256)


def test_snapshot_names_the_mode_and_counts_rows(build: Build, kind: str) -> None:
    engine = build(kind)
    engine.admit(ROWS["greedy"])

    snapshot = engine.snapshot()

    assert snapshot["active_rows"] == 1
    assert snapshot["mode"] in {"serial", "ar_batch", "mtp_batch"}


def test_row_with_numbers_that_are_not_finite_ends_alone(build: Build, kind: str) -> None:
    model = tiny_llama(poison_token_id=POISON)
    good = [] if kind == "serial" else [ROWS["sampled"], NEIGHBOURS[0]]

    heard = run(build(kind, model=model), [*good[:1], Row("bad", (4, POISON, 6), 9), *good[1:]])

    assert heard.ends["bad"].reason == "error"
    assert "not finite" in heard.ends["bad"].message
    assert not heard.tokens["bad"]
    for row in good:
        assert audit(model.model, row.prompt, heard.tokens[row.row_id], row.sampling).passed


def test_engine_takes_good_rows_after_a_bad_one(build: Build, kind: str) -> None:
    model = tiny_llama(poison_token_id=POISON)
    engine = build(kind, model=model)
    run(engine, [Row("bad", (4, POISON, 6), 9)])

    heard = run(engine, [ROWS["sampled"]])

    assert audit(model.model, ROWS["sampled"].prompt, heard.tokens["row"], SAMPLED).passed


def test_engine_that_died_says_so_again(build: Build, kind: str) -> None:
    model = tiny_llama()
    tripwire = Tripwire.under(model)
    engine = build(kind, model=model)
    engine.admit(ROWS["greedy"])
    while not engine.step().tokens:
        pass

    tripwire.is_armed = True
    with pytest.raises(EngineDeadError, match="tripped"):
        run(engine, [])
    tripwire.is_armed = False
    with pytest.raises(EngineDeadError):
        engine.step()


class Tripwire:
    """A layer that fails on demand."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.is_armed = False

    @classmethod
    def under(cls, loaded: LoadedModel) -> Tripwire:
        model: Any = loaded.model
        tripwire = cls(model.model.layers[0])
        model.model.layers[0] = tripwire
        return tripwire

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_armed:
            raise RuntimeError("tripped")
        return self._layer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)
