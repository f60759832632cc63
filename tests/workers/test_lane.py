"""What a worker says it serves. Engine: scripted; Redis: none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from broker.wire import SamplingDefaults
from mtplx_core.engine import Geometry, Profile, SchedulerMode
from mtplx_core.engines.scripted import BYTES_PER_TOKEN, ScriptedEngine
from workers.config import WorkerConfig
from workers.lane import ServedModel, card_of, lane_of, route_of, settled, token_budget_of, tongue_of
from workers.scripted_lane import tokenizer_files

GEOMETRY = Geometry(decode_batch_max=8, max_context_tokens=100, depth=1)
MODEL = ServedModel("tiny@0a1b", "tiny", "llama", 300, 4096, frozenset({2, 0}), {"tokenizer.json": b"{}"})


def config(**changes: Any) -> WorkerConfig:
    return WorkerConfig(redis_url="unused", **changes)


@pytest.mark.parametrize(
    ("mode", "rows", "route"),
    [
        (SchedulerMode.AR_BATCH, 8, "llama_ar_batch_b8_t1"),
        (SchedulerMode.MTP_BATCH, 8, "llama_mtp_batch_b8_t2"),
        (SchedulerMode.SERIAL, 1, "llama_serial_b1_t1"),
    ],
)
def test_route_names_engine_and_shape(mode: SchedulerMode, rows: int, route: str) -> None:
    assert route_of("llama", replace(GEOMETRY, decode_batch_max=rows), config(mode=mode)) == route


def test_lane_says_what_a_request_must_match_and_fit() -> None:
    lane = lane_of(MODEL, GEOMETRY, config(mode=SchedulerMode.AR_BATCH, profile=Profile.B1_EXACT), token_budget=7)

    assert lane.fingerprint == "tiny@0a1b:b1-exact:llama_ar_batch_b8_t1"
    assert (lane.decode_batch_max, lane.max_context_tokens, lane.token_budget) == (8, 100, 7)
    assert (type(lane.profile), type(lane.mode)) == (str, str) or (lane.profile, lane.mode) == ("b1-exact", "ar_batch")


def test_card_says_what_an_api_process_needs() -> None:
    card = card_of(MODEL, GEOMETRY, config(), created_s=5)

    assert (card.model, card.name, card.created_s, card.vocab_size) == ("tiny@0a1b", "tiny", 5, 300)
    assert (card.max_context_tokens, card.eos_token_ids) == (100, (0, 2))


def test_card_carries_what_the_authors_say_of_sampling_unless_told_not_to() -> None:
    said = (
        b'{"do_sample": false, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 64, "eos_token_id": 3}'
    )
    model = replace(MODEL, tokenizer_files={**MODEL.tokenizer_files, "generation_config.json": said})

    cards = [card_of(model, GEOMETRY, config(generation_config=name), created_s=5) for name in ("model", "none")]

    assert cards[0].defaults == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, max_tokens=64)
    assert cards[1].defaults == card_of(MODEL, GEOMETRY, config(), created_s=5).defaults == SamplingDefaults()
    assert cards[0].eos_token_ids == cards[1].eos_token_ids


def test_tokenizers_with_equal_files_have_one_hash() -> None:
    same = replace(MODEL, identity="other@1", tokenizer_files=dict(MODEL.tokenizer_files))
    other = replace(MODEL, tokenizer_files={"tokenizer.json": b"{ }"})

    assert same.tokenizer == MODEL.tokenizer != other.tokenizer


def test_tongue_knows_the_bytes_of_a_byte_level_tokenizer() -> None:
    tongue = tongue_of(replace(MODEL, tokenizer_files=tokenizer_files()))

    assert tongue.table is not None
    assert tongue.table[-1] == b"~"


@pytest.mark.parametrize(
    "files",
    [{}, {"tokenizer.json": b"not json"}, {"tokenizer.json": b'{"model": {"vocab": {}}}'}],
    ids=["none", "unreadable", "no-bytes"],
)
def test_tongue_has_no_table_where_tokens_have_no_bytes_of_their_own(files: dict[str, bytes]) -> None:
    assert tongue_of(replace(MODEL, tokenizer_files=files)).table is None


@pytest.mark.parametrize(
    ("changes", "budget"),
    [
        ({}, 0),
        ({"token_budget": 123}, 123),
        ({"memory_bytes": 8 * 100 * BYTES_PER_TOKEN}, 0),
        ({"memory_bytes": 250 * BYTES_PER_TOKEN}, 250),
    ],
    ids=["unknown", "given", "roomy", "tight"],
)
def test_token_budget_follows_the_memory(changes: dict[str, int], budget: int) -> None:
    assert token_budget_of(ScriptedEngine(GEOMETRY), config(**changes)) == budget


@pytest.mark.parametrize(
    ("mode", "rows", "depth"),
    [(SchedulerMode.SERIAL, 1, 0), (SchedulerMode.AR_BATCH, 4, 0), (SchedulerMode.MTP_BATCH, 4, 2)],
)
def test_config_asks_for_the_geometry_of_its_mode(mode: SchedulerMode, rows: int, depth: int) -> None:
    geometry = config(mode=mode, decode_batch_max=4, depth=2).geometry

    assert (geometry.decode_batch_max, geometry.depth) == (rows, depth)


@pytest.mark.parametrize(
    ("asked", "refusal", "engine", "mode"),
    [
        (None, "", "mlx", SchedulerMode.MTP_BATCH),
        (None, "its layers keep RotatingKVCache", "mlx", SchedulerMode.AR_BATCH),
        (None, "", "scripted", SchedulerMode.AR_BATCH),
        (SchedulerMode.MTP_BATCH, "its layers keep RotatingKVCache", "mlx", SchedulerMode.MTP_BATCH),
        (SchedulerMode.SERIAL, "", "mlx", SchedulerMode.SERIAL),
    ],
)
def test_config_takes_the_best_mode_of_a_model_unless_one_is_asked_for(
    asked: SchedulerMode | None, refusal: str, engine: str, mode: SchedulerMode
) -> None:
    assert settled(config(mode=asked, engine=engine), replace(MODEL, mtp_refusal=refusal)).mode is mode


def test_config_beats_five_times_a_lease() -> None:
    assert config(lease_s=10.0).beat_every_s == 2.0
