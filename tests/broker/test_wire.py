"""Wire types: golden bytes, and what older and newer versions make of each other. Engine: none; Redis: none."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from broker import wire
from broker.errors import WireError

REQUEST = wire.Request(
    id="r1",
    model="tiny@0a1b",
    profile="balanced",
    prompt=wire.pack_tokens([1, 258]),
    max_tokens=16,
    sampling=wire.Sampling(0.5, 0.9, 40, 0.05, 1.1, 0.2, -0.3, ((7, 1.5),)),
    stop=(b"END",),
    stop_token_ids=(2,),
    ignore_eos=True,
    top_logprobs=3,
    min_tokens=4,
)
TICKET = wire.Ticket("r1", "tiny@0a1b", "balanced", 3, 16, "offline", "k1", 2)
LANE = wire.Lane("tiny@0a1b", "balanced", "llama_b8_t2", "mtp_batch", 8, 2048, 1, 16384, 1)
CARD = wire.ModelCard(
    "tiny@0a1b",
    "tiny",
    "hash",
    2048,
    1_700_000_000,
    49152,
    (0, 2),
    wire.SamplingDefaults(0.5, None, 20, None, 1.5, 64),
)
LOGPROB = wire.Logprob(-0.5, ((7, -0.5), (8, -1.5)))
TOKENS = wire.Tokens("r1", 5, wire.pack_tokens([7, 8]), (wire.Logprob(-0.5), wire.Logprob(-1.0, ((8, -1.0),))))
PROGRESS = wire.Progress("r1", 256, 1024)
FINISHED = wire.Finished("r1", "stop", 10, 42, "stop", wire.Stats(4, (4,), (3,), 1, 8))
FAILED = wire.Failed("r1", "row_rejected", "too long")

STRUCTS: list[tuple[Any, Callable[[bytes], Any], str]] = [
    (
        REQUEST,
        wire.decode_request,
        "9ca772657175657374a27231a974696e794030613162a862616c616e636564c40801000000020100001098cb3fe0000000000000"
        "cb3feccccccccccccd28cb3fa999999999999acb3ff199999999999acb3fc999999999999acbbfd3333333333333919207"
        "cb3ff800000000000091c403454e449102c30304",
    ),
    (
        TICKET,
        wire.decode_ticket,
        "99a67469636b6574a27231a974696e794030613162a862616c616e6365640310a76f66666c696e65a26b3102",
    ),
    (
        LANE,
        wire.decode_lane,
        "9aa46c616e65a974696e794030613162a862616c616e636564ab6c6c616d615f62385f7432a96d74705f626174636808cd080001"
        "cd400001",
    ),
    (
        CARD,
        wire.decode_card,
        "99a56d6f64656ca974696e794030613162a474696e79a468617368cd0800ce6553f100cdc000920002"
        "96cb3fe0000000000000c014c0cb3ff800000000000040",
    ),
    (LOGPROB, wire.decode_logprob, "92cbbfe0000000000000929207cbbfe00000000000009208cbbff8000000000000"),
]
EVENTS: list[tuple[wire.Event, str]] = [
    (
        TOKENS,
        "9195a6746f6b656e73a2723105c40807000000080000009292cbbfe00000000000009092cbbff0000000000000919208"
        "cbbff0000000000000",
    ),
    (PROGRESS, "9194a870726f6772657373a27231cd0100cd0400"),
    (FINISHED, "9197a866696e6973686564a27231a473746f700a2aa473746f709504910491030108"),
    (FAILED, "9194a66661696c6564a27231ac726f775f72656a6563746564a8746f6f206c6f6e67"),
]
TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=50)


def name_of(value: object) -> str:
    return type(value).__name__ if isinstance(value, msgspec.Struct) else ""


@pytest.mark.parametrize(("value", "decode", "golden"), STRUCTS, ids=name_of)
def test_struct_has_its_golden_bytes(value: Any, decode: Callable[[bytes], Any], golden: str) -> None:
    assert wire.encode(value).hex() == golden
    assert decode(bytes.fromhex(golden)) == value


@pytest.mark.parametrize(("event", "golden"), EVENTS, ids=name_of)
def test_event_has_its_golden_bytes(event: wire.Event, golden: str) -> None:
    assert wire.encode_events([event]).hex() == golden
    assert wire.decode_events(bytes.fromhex(golden)) == (event,)


@pytest.mark.parametrize(("value", "decode", "golden"), STRUCTS, ids=name_of)
def test_struct_is_read_when_a_newer_version_added_a_field(
    value: Any, decode: Callable[[bytes], Any], golden: str
) -> None:
    newer = [*msgspec.msgpack.decode(wire.encode(value)), "a field of tomorrow"]

    assert decode(msgspec.msgpack.encode(newer)) == value


@pytest.mark.parametrize(
    ("decode", "fields", "value"),
    [
        (
            wire.decode_request,
            ["request", "r1", "m", "balanced", b"", 16],
            wire.Request("r1", "m", "balanced", b"", 16),
        ),
        (
            wire.decode_ticket,
            ["ticket", "r1", "m", "balanced", 3, 16, "offline"],
            wire.Ticket("r1", "m", "balanced", 3, 16, "offline"),
        ),
        (
            wire.decode_lane,
            ["lane", "m", "balanced", "route", "serial", 1, 64],
            wire.Lane("m", "balanced", "route", "serial", 1, 64),
        ),
    ],
    ids=["request", "ticket", "lane"],
)
def test_struct_is_read_when_an_older_version_knew_fewer_fields(
    decode: Callable[[bytes], Any], fields: list[object], value: object
) -> None:
    assert decode(msgspec.msgpack.encode(fields)) == value


@pytest.mark.parametrize(
    "decode",
    [
        wire.decode_request,
        wire.decode_ticket,
        wire.decode_lane,
        wire.decode_card,
        wire.decode_logprob,
        wire.decode_events,
    ],
)
@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"\x91\xa3xyz", wire.encode(TICKET)[:-1]])
def test_decoder_refuses_bytes_of_another_kind(decode: Callable[[bytes], Any], data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


def test_request_of_the_first_version_is_read_as_it_was_meant() -> None:
    golden = bytes.fromhex(
        "9ba772657175657374a27231a974696e794030613162a862616c616e636564c40801000000020100001098cb3fe0000000000000"
        "cb3feccccccccccccd28cb3fa999999999999acb3ff199999999999acb3fc999999999999acbbfd3333333333333919207"
        "cb3ff800000000000091c403454e449102c303"
    )

    assert wire.decode_request(golden) == structs.replace(REQUEST, min_tokens=0)


def test_card_of_the_first_version_says_nothing_of_sampling() -> None:
    golden = bytes.fromhex("98a56d6f64656ca974696e794030613162a474696e79a468617368cd0800ce6553f100cdc000920002")

    assert wire.decode_card(golden) == structs.replace(CARD, defaults=wire.SamplingDefaults())


def test_only_a_request_that_an_older_reader_would_misread_needs_a_newer_one() -> None:
    assert REQUEST.min_wire == 2
    assert structs.replace(REQUEST, min_tokens=0).min_wire == 1


def test_ticket_keeps_min_wire_in_its_place_for_ever() -> None:
    assert msgspec.msgpack.decode(wire.encode(TICKET))[8] == TICKET.min_wire


def test_ticket_costs_prompt_and_completion() -> None:
    assert TICKET.cost_tokens == 19


def test_lane_fingerprint_names_model_profile_and_route() -> None:
    assert LANE.fingerprint == "tiny@0a1b:balanced:llama_b8_t2"


@settings(deadline=None)
@given(tokens=TOKEN_IDS)
def test_tokens_are_the_same_after_packing(tokens: list[int]) -> None:
    assert wire.unpack_tokens(wire.pack_tokens(tokens)) == tuple(tokens)


def test_tokens_are_packed_little_endian() -> None:
    assert wire.pack_tokens([1, 256]) == b"\x01\x00\x00\x00\x00\x01\x00\x00"


@pytest.mark.parametrize("token", [-1, 2**32])
def test_tokens_are_refused_when_they_do_not_fit(token: int) -> None:
    with pytest.raises(OverflowError):
        wire.pack_tokens([token])


def test_tokens_are_refused_when_bytes_are_left_over() -> None:
    with pytest.raises(WireError):
        wire.unpack_tokens(b"\x01\x00\x00")


def test_seed_is_the_start_of_the_ids_sha1() -> None:
    assert f"{wire.seed_of('r1'):016x}" == hashlib.sha1(b"r1").hexdigest()[:16]


def test_new_ids_differ_and_are_safe_in_keys() -> None:
    first, second = wire.new_id("chat"), wire.new_id("chat")

    assert first != second
    assert first.removeprefix("chat-").isalnum()
