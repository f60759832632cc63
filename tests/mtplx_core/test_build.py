"""Which engine a lane gets, and what the exact profile and the engine's thread promise. Model: tiny random llama."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from harness.models import tiny_llama
from mtplx_core.build import build_engine
from mtplx_core.engine import Geometry, Profile, Row, SamplingParams, SchedulerMode
from mtplx_core.engines.ar_batch import ArBatchEngine
from mtplx_core.engines.lane_guard import inside_mtp_lane
from mtplx_core.engines.serial import SerialEngine
from mtplx_core.errors import LaneIsolationError
from mtplx_core.models.loader import LoadedModel
from mtplx_core.mtp.engine import MtpBatchEngine
from tests.mtplx_core.driving import Heard, run

GEOMETRY = Geometry(decode_batch_max=4, max_context_tokens=200, depth=1, prefill_chunk_tokens=16)
ROW = Row("row", (10, 20, 30), 16, SamplingParams(temperature=0.8, seed=3), ignore_eos=True, top_logprobs=2)
NEIGHBOURS = [Row("a", tuple(range(40, 90)), 20), Row("b", (7,), 9, SamplingParams(temperature=1.5, top_k=3, seed=4))]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_llama()


def test_each_mode_gets_its_engine(loaded: LoadedModel) -> None:
    engines = {mode: type(build_engine(mode, loaded, geometry=GEOMETRY)) for mode in SchedulerMode}

    assert engines == {
        SchedulerMode.SERIAL: SerialEngine,
        SchedulerMode.AR_BATCH: ArBatchEngine,
        SchedulerMode.MTP_BATCH: MtpBatchEngine,
    }


def test_serial_lane_says_that_it_holds_one_row(loaded: LoadedModel) -> None:
    assert build_engine(SchedulerMode.SERIAL, loaded, geometry=GEOMETRY).geometry.decode_batch_max == 1


@pytest.mark.parametrize("mode", SchedulerMode)
def test_lane_holds_no_more_tokens_than_the_model_was_made_for(loaded: LoadedModel, mode: SchedulerMode) -> None:
    wide = replace(GEOMETRY, max_context_tokens=10_000)

    assert build_engine(mode, loaded, geometry=wide).geometry.max_context_tokens == loaded.max_context


@pytest.mark.parametrize("mode", [SchedulerMode.SERIAL, SchedulerMode.AR_BATCH])
def test_engine_that_drafts_nothing_says_so(loaded: LoadedModel, mode: SchedulerMode) -> None:
    assert build_engine(mode, loaded, geometry=GEOMETRY).geometry.depth == 0


@pytest.mark.parametrize("mode", [SchedulerMode.AR_BATCH, SchedulerMode.MTP_BATCH])
def test_exact_profile_decodes_each_row_alone_and_holds_several(loaded: LoadedModel, mode: SchedulerMode) -> None:
    engine = build_engine(mode, loaded, geometry=GEOMETRY, profile=Profile.B1_EXACT)

    heard = run(engine, [ROW, *NEIGHBOURS])

    assert engine.geometry.decode_batch_max == GEOMETRY.decode_batch_max
    assert {(end.stats.min_width, end.stats.max_width) for end in heard.ends.values()} == {(1, 1)}


def test_exact_profile_gives_the_same_bits_whoever_the_neighbours_are(loaded: LoadedModel) -> None:
    def heard(rows: list[Row]) -> Heard:
        engine = build_engine(SchedulerMode.AR_BATCH, loaded, geometry=GEOMETRY, profile=Profile.B1_EXACT)
        return run(engine, rows)

    alone, among = heard([ROW]), heard([NEIGHBOURS[0], ROW, NEIGHBOURS[1]])

    assert among.tokens["row"] == alone.tokens["row"]
    assert among.logprobs["row"] == alone.logprobs["row"]


def test_mtp_lane_cannot_call_the_ar_engine(loaded: LoadedModel) -> None:
    engine = build_engine(SchedulerMode.AR_BATCH, loaded, geometry=GEOMETRY)

    with inside_mtp_lane(), pytest.raises(LaneIsolationError):
        engine.admit(ROW)
    with inside_mtp_lane(), pytest.raises(LaneIsolationError):
        engine.step()


@pytest.mark.parametrize("mode", SchedulerMode)
def test_engine_lives_on_a_thread_of_its_own(mode: SchedulerMode) -> None:
    heard: list[Heard] = []

    def live() -> None:
        engine = build_engine(mode, tiny_llama(), geometry=GEOMETRY)
        heard.append(run(engine, [ROW]))
        engine.close()

    thread = threading.Thread(target=live)
    thread.start()
    thread.join(timeout=60)

    assert len(heard[0].tokens["row"]) == 16
