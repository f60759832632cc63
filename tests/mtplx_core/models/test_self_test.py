"""The self-test before a lane serves. Engines: serial, ar_batch, mtp_batch on random models of several families."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mtplx_core.build import choose_mode, mode_refusal
from mtplx_core.engine import Geometry, Profile, SchedulerMode
from mtplx_core.engines.serial import SerialEngine
from mtplx_core.errors import UnsupportedModeError
from mtplx_core.models import self_test
from mtplx_core.models.loader import LoadedModel
from tests.mtplx_core.models.tiny import CONFIGS, tiny_model

MTP, AR, SERIAL = SchedulerMode.MTP_BATCH, SchedulerMode.AR_BATCH, SchedulerMode.SERIAL
GEOMETRY = Geometry(self_test.ROWS, self_test.CONTEXT_TOKENS)


class Moody:
    """A model that goes wrong with a batch of several rows, or with few positions at once."""

    def __init__(self, loaded: LoadedModel, *, rows: int = 1, positions: int = 99, fails: bool = False) -> None:
        self._model: Any = loaded.model
        self._rows = rows
        self._positions = positions
        self._fails = fails

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        logits: mx.array = self._model(tokens, cache=cache)
        if cache is None or tokens.shape[0] < self._rows or tokens.shape[1] > self._positions:
            return logits
        if self._fails:
            raise ValueError("shapes (3,1,2,4) and (3,2,2,2,4) cannot be broadcast")
        return 0.9 * logits


def moody(loaded: LoadedModel, **moods: Any) -> LoadedModel:
    fields = {name: getattr(loaded, name) for name in LoadedModel.__dataclass_fields__}
    return LoadedModel(**{**fields, "model": Moody(loaded, **moods)})


@pytest.mark.parametrize("mode", [MTP, AR, SERIAL])
@pytest.mark.parametrize("name", CONFIGS)
def test_mode_that_says_what_the_model_says_is_taken(name: str, mode: SchedulerMode) -> None:
    assert mode_refusal(mode, tiny_model(name)) == ""


@pytest.mark.parametrize("mode", [MTP, AR])
def test_exact_profile_is_tested_on_the_engine_it_runs_on(mode: SchedulerMode) -> None:
    assert mode_refusal(mode, tiny_model("granite"), profile=Profile.B1_EXACT) == ""


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("granite", {"logits_scaling": 1.0}),
        ("cohere", {"logit_scale": 1.0}),
        ("gemma2", {"final_logit_softcapping": 1000.0}),
        ("minicpm", {"dim_model_base": 64}),
    ],
    ids=["scale", "other-scale", "soft-cap", "scale-before"],
)
def test_engine_that_loses_what_a_family_does_to_its_logits_is_refused(name: str, changes: dict[str, Any]) -> None:
    engine = SerialEngine(tiny_model(name, **changes), GEOMETRY)

    assert "log-probabilities" in self_test.refusal(engine, tiny_model(name))


def test_engine_is_left_empty() -> None:
    engine = SerialEngine(tiny_model("llama"), GEOMETRY)

    assert self_test.refusal(engine, tiny_model("llama")) == ""
    assert engine.active_rows == 0


@pytest.mark.parametrize(("fails", "reason"), [(False, "log-probabilities"), (True, "broadcast")], ids=["off", "dies"])
def test_lane_falls_to_the_next_mode_that_passes(fails: bool, reason: str) -> None:
    choice = choose_mode(moody(tiny_model("llama"), rows=2, fails=fails))

    assert choice.mode is SERIAL
    assert set(choice.refusals) == {MTP, AR}
    assert all(reason in why for why in choice.refusals.values())


def test_model_that_no_mode_can_run_is_refused_with_every_reason() -> None:
    with pytest.raises(UnsupportedModeError, match=r"mtp_batch: .*ar_batch: .*serial: "):
        choose_mode(moody(tiny_model("llama"), positions=3))


def test_mode_that_was_asked_for_alone_has_nothing_to_fall_to() -> None:
    with pytest.raises(UnsupportedModeError, match="ar_batch"):
        choose_mode(moody(tiny_model("llama"), rows=2), [AR])
