"""What crosses the wire: frozen MessagePack structs, arrays on the wire, new fields only at the end with a default.

`WIRE_VERSION` rises when an older reader would misread an entry; each entry names the lowest version that can
read it. Token ids travel as packed unsigned 32-bit integers, little endian, as in the token log.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
from array import array
from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeVar

import msgspec

from broker.errors import WireError

T = TypeVar("T")

WIRE_VERSION = 2
"""1: the first. 2: `Request.min_tokens`, which a reader of 1 would pass over."""

Priority = Literal["interactive", "offline"]
Status = Literal["waiting", "running", "finished", "failed", "cancelled", "expired"]
FinishReason = Literal["stop", "length", "cancelled", "deadline"]
Cause = Literal["client", "deadline", "operator", "limit", "listener", "stop", "shutdown"]
"""Why somebody asked for a request to end; the first one is recorded."""

TERMINAL: frozenset[str] = frozenset({"finished", "failed", "cancelled", "expired"})


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How the next token is chosen. The seed is not here: it is kept beside the request (see `Row.seed`)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()


class Request(msgspec.Struct, frozen=True, array_like=True, tag="request"):
    """One client call as the workers see it: token ids in, limits and sampling with them."""

    id: str
    model: str
    """Model identity, `name@hash`."""
    profile: str
    prompt: bytes
    """Packed token ids; see `pack_tokens`."""
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[bytes, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    min_tokens: int = 0
    """Completion tokens before which neither an end token nor a stop string ends it."""

    @property
    def min_wire(self) -> int:
        """Lowest wire version that reads it."""
        return 2 if self.min_tokens else 1


class Ticket(msgspec.Struct, frozen=True, array_like=True, tag="ticket"):
    """What the former needs to know of a waiting request; travels in the waiting entry beside its ordinal."""

    id: str
    model: str
    profile: str
    prompt_tokens: int
    max_tokens: int
    priority: Priority
    key_id: str = ""
    """Id of the API key that pays; empty when keys are off."""
    min_wire: int = 1

    @property
    def cost_tokens(self) -> int:
        """Most cache slots the request can ever take."""
        return self.prompt_tokens + self.max_tokens


class Lane(msgspec.Struct, frozen=True, array_like=True, tag="lane"):
    """What a worker serves; a request matches a lane by model and profile."""

    model: str
    profile: str
    route: str
    mode: str
    decode_batch_max: int
    max_context_tokens: int
    depth: int = 0
    token_budget: int = 0
    """Cache slots that fit the worker's memory, all rows together; 0 means rows alone are the bound."""
    wire: int = 1
    """Wire version that the worker reads."""

    @property
    def fingerprint(self) -> str:
        return f"{self.model}:{self.profile}:{self.route}"

    @property
    def row_tokens_max(self) -> int:
        """Longest prompt and completion that one row can ever have here, by context and by memory."""
        return min(self.max_context_tokens, self.token_budget or self.max_context_tokens)


class SamplingDefaults(msgspec.Struct, frozen=True, array_like=True):
    """What the authors of a model mean where a caller says nothing; None: they say nothing either."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


class ModelCard(msgspec.Struct, frozen=True, array_like=True, tag="model"):
    """What an API process needs in order to speak for a model."""

    model: str
    name: str
    tokenizer: str
    """Hash under which the tokenizer files are stored."""
    max_context_tokens: int
    created_s: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    defaults: SamplingDefaults = SamplingDefaults()
    """For whoever makes a `Request` of a call that leaves them out; a worker takes a request as it is."""


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of the committed token and of the most likely ones."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Stats(msgspec.Struct, frozen=True, array_like=True):
    """What the engine did for one request."""

    cycles: int = 0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    min_width: int = 0
    max_width: int = 0


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag="tokens"):
    """New committed tokens of one request, the first of them at `position` of the completion."""

    id: str
    position: int
    tokens: bytes
    logprobs: tuple[Logprob, ...] | None = None


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """How far the prefill of one request has come."""

    id: str
    done: int
    total: int


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """The request ended without a failure."""

    id: str
    reason: FinishReason
    length: int = -1
    """Tokens committed; -1 means: as many as the log holds."""
    text_end: int = -1
    """Byte of the completion's text where it ends; -1 means: at the end of the last token."""
    cause: Cause | None = None
    """Who asked for the end, when somebody did."""
    stats: Stats = Stats()


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The request ended with an error."""

    id: str
    code: str
    message: str


Event = Tokens | Progress | Finished | Failed


class Assignment(NamedTuple):
    """A row of a job: which request, and with which attempt it was dispatched."""

    request_id: str
    attempt: int


_request_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_ticket_decoder = msgspec.msgpack.Decoder(Ticket)
_lane_decoder = msgspec.msgpack.Decoder(Lane)
_card_decoder = msgspec.msgpack.Decoder(ModelCard)
_logprob_decoder = msgspec.msgpack.Decoder(Logprob)
_events_decoder = msgspec.msgpack.Decoder(tuple[Event, ...])


def encode(value: Request | Ticket | Lane | ModelCard | Logprob) -> bytes:
    """One struct as MessagePack."""
    return _request_encoder.encode(value)


def encode_events(events: Iterable[Event]) -> bytes:
    """A reply message: any number of events, in order."""
    return _request_encoder.encode(tuple(events))


def decode_request(data: bytes) -> Request:
    """Raises: WireError."""
    return _decode(_request_decoder, data)


def decode_ticket(data: bytes) -> Ticket:
    """Raises: WireError."""
    return _decode(_ticket_decoder, data)


def decode_lane(data: bytes) -> Lane:
    """Raises: WireError."""
    return _decode(_lane_decoder, data)


def decode_card(data: bytes) -> ModelCard:
    """Raises: WireError."""
    return _decode(_card_decoder, data)


def decode_logprob(data: bytes) -> Logprob:
    """Raises: WireError."""
    return _decode(_logprob_decoder, data)


def decode_events(data: bytes) -> tuple[Event, ...]:
    """Raises: WireError."""
    return _decode(_events_decoder, data)


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as unsigned 32-bit integers, little endian.

    Raises:
        OverflowError: an id is negative or does not fit 32 bits.
    """
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """Inverse of `pack_tokens`.

    Raises:
        WireError: the length is not a multiple of four.
    """
    if len(data) % 4:
        raise WireError("packed tokens must be a multiple of four bytes long")
    unpacked = array("I")
    unpacked.frombytes(data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return tuple(unpacked)


def seed_of(request_id: str) -> int:
    """The seed of a request that brings none: the first 64 bits of its id's SHA-1, so that twice is the same."""
    return int(hashlib.sha1(request_id.encode(), usedforsecurity=False).hexdigest()[:16], 16)


def new_id(prefix: str) -> str:
    """A fresh id: letters, digits, `_` and `-` only."""
    return f"{prefix}-{secrets.token_hex(12)}"


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise WireError(f"cannot decode: {error}") from error
