"""An in-memory queue for the API's tests: one model with a tiny tokenizer, and answers that a test writes down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from api.fleet.backend import Fleet
from broker.errors import BrokerError
from broker.registry import DaemonRecord, Load
from broker.scripts import Accepted, Idempotency, Quota
from broker.text.stop_strings import StopMatcher
from broker.text.token_bytes import byte_table, text_of
from broker.wire import (
    Cause,
    Event,
    Failed,
    Finished,
    Lane,
    Logprob,
    ModelCard,
    Progress,
    Request,
    Stats,
    Ticket,
    Tokens,
    pack_tokens,
)

NAME = "tiny"
IDENTITY = "tiny@0123456789ab"
CONTEXT = 256
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = ["The quick brown fox jumps over the lazy dog. " * 3, "Füchse, 漢字, 😀 und mehr.", "Hello, world!"]


@cache
def tokenizer_files() -> dict[str, bytes]:
    """A small byte-level tokenizer with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    config = {"chat_template": TEMPLATE, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_buffer(tokenizer_files()["tokenizer.json"])


EOS = 2


def encode(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True, slots=True)
class Script:
    """How the fake answers one request."""

    text: str = "Hello, world!"
    step: int = 1
    """Tokens per event."""
    failure: Failed | None = None
    """Ends the request after the text, in place of a proper end."""
    reason: str | None = None
    """Finish reason forced on the end."""
    cause: Cause | None = None
    """Who asked for the end."""
    prefill: Sequence[int] = ()
    stats: Stats = Stats()
    hangs: bool = False
    """After the text nothing more comes until the request is abandoned."""


class FakeHandle:
    """One request of the fake queue."""

    def __init__(self, backend: FakeBackend, request: Request, script: Script, accepted: Accepted) -> None:
        self.accepted = accepted
        self._backend = backend
        self._request = request
        self._script = script
        self._gone = asyncio.Event()

    async def events(self) -> AsyncIterator[Event]:
        for event in scripted(self._request, self._script):
            await self._backend.gate.wait()
            yield event
            await asyncio.sleep(0)
        if self._script.hangs:
            await self._gone.wait()
        self._backend.running.discard(self._request.id)

    async def abandon(self, cause: Cause = "client") -> None:
        self._backend.abandoned[self._request.id] = cause
        self._backend.running.discard(self._request.id)
        self._gone.set()

    def leave(self) -> None:
        self._gone.set()


@dataclass
class FakeBackend:
    """A queue whose answers come from `script`."""

    script: Callable[[Request], Script] = lambda _: Script()
    refusal: BrokerError | None = None
    refuse_after: int = 0
    fleet_error: BrokerError | None = None
    submitted: list[tuple[Request, Ticket, int | None, int]] = field(default_factory=list)
    abandoned: dict[str, Cause] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    """For how many ms each request is wanted without a listener."""
    running: set[str] = field(default_factory=set)
    picture: Fleet = field(default_factory=lambda: fleet())
    files: dict[str, bytes] = field(default_factory=tokenizer_files)
    fetched: int = 0
    left: tuple[int | None, int | None] = (59, 900)
    """Requests and tokens left to every key with a quota."""
    is_connected: bool = True
    is_closed: bool = False
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Held shut by a test that wants events to wait."""

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def requests(self) -> list[Request]:
        return [request for request, _, _, _ in self.submitted]

    async def submit(
        self,
        request: Request,
        ticket: Ticket,
        *,
        seed: int | None,
        timeout_ms: int,
        retain_ms: int,
        quota: Quota,
        idempotency: Idempotency | None = None,
    ) -> FakeHandle:
        if self.refusal is not None and len(self.submitted) >= self.refuse_after:
            raise self.refusal
        self.submitted.append((request, ticket, seed, timeout_ms))
        self.running.add(request.id)
        left = self.left if any(quota) else (None, None)
        return FakeHandle(self, request, self.script(request), Accepted(1, True, request.id, *left))

    def while_answering(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def keep(self, request_id: str, for_ms: int) -> None:
        self.kept[request_id] = for_ms

    async def cancel_unwanted(self, request_id: str) -> None:
        self.abandoned[request_id] = "listener"

    async def fleet(self) -> Fleet:
        if self.fleet_error is not None:
            raise self.fleet_error
        return self.picture

    async def tokenizer_files(self, digest: str) -> dict[str, bytes]:
        self.fetched += 1
        return self.files

    async def close(self) -> None:
        self.is_closed = True


def card(name: str = NAME, identity: str = IDENTITY) -> ModelCard:
    return ModelCard(
        model=identity,
        name=name,
        tokenizer="t1",
        max_context_tokens=CONTEXT,
        created_s=1_700_000_000,
        vocab_size=tokenizer().get_vocab_size(),
        eos_token_ids=(EOS,),
    )


def worker(
    *,
    phase: str = "serving",
    is_accepting: bool = True,
    profile: str = "balanced",
    snapshot: str = '{"cycles": 3}',
    progress: int = 0,
    active_rows: int = 0,
    beat: int = 1,
    name: str = "worker-1",
) -> DaemonRecord:
    lane = Lane(IDENTITY, profile, "ar_batch_b8", "ar_batch", decode_batch_max=8, max_context_tokens=CONTEXT)
    return DaemonRecord(
        id=name,
        kind="worker",
        beat=beat,
        fields={"phase": phase, "snapshot": snapshot},
        lane=lane,
        free_rows=8,
        is_accepting=is_accepting,
        progress=progress,
        active_rows=active_rows,
    )


def former(beat: int = 1, *, working: str = "1", snapshot: str = "{}", name: str = "former-1") -> DaemonRecord:
    return DaemonRecord(name, "former", beat, {"working": working, "snapshot": snapshot})


_beats = count(1)


def beating(picture: Fleet) -> Fleet:
    """The picture a moment later: everybody has beaten, and so has a former."""
    daemons = [replace(daemon, beat=next(_beats)) for daemon in picture.daemons]
    return replace(picture, daemons=[*daemons, former(next(_beats), working="0", name="former-that-beats")])


def fleet(
    *,
    daemons: Sequence[DaemonRecord] | None = None,
    cards: Sequence[ModelCard] | None = None,
    last_seen_ms: Mapping[str, int] | None = None,
    seen_ago_ms: int = 0,
) -> Fleet:
    return Fleet(
        cards={each.model: each for each in ([card()] if cards is None else cards)},
        daemons=[worker()] if daemons is None else daemons,
        last_seen_ms={IDENTITY: 1_000_000} if last_seen_ms is None else last_seen_ms,
        load=Load({"interactive": 0}, {"interactive": 0}, {}),
        ended={"interactive:finished:stop": 4},
        now_ms=1_000_000 + seen_ago_ms,
    )


def scripted(request: Request, script: Script) -> list[Event]:
    """The events a worker with this script would send: its text up to `max_tokens` or a stop string, then EOS."""
    table = byte_table(tokenizer_files()["tokenizer.json"])
    assert table is not None
    tokens = [*encode(script.text), EOS]
    kept, reason, end = tokens[: request.max_tokens], "length" if len(tokens) > request.max_tokens else "stop", None
    matcher = StopMatcher(request.stop)
    for place, token in enumerate(kept, 1):
        end = matcher.feed(text_of(table, (token,)), may_end=place > request.min_tokens).end
        if end is not None:
            kept, reason = kept[:place], "stop"
            break
    events: list[Event] = [Progress(request.id, done, max(script.prefill)) for done in script.prefill]
    for start in range(0, len(kept), script.step):
        part = kept[start : start + script.step]
        logprobs = None
        if request.top_logprobs is not None:
            logprobs = tuple(Logprob(-0.5, ((token, -0.5), (1, -2.0))[: request.top_logprobs]) for token in part)
        events.append(Tokens(request.id, start, pack_tokens(part), logprobs))
    if script.failure is not None:
        events.append(script.failure)
    elif not script.hangs:
        final = script.reason or reason
        text_end = -1 if end is None else end
        events.append(Finished(request.id, final, len(kept), text_end, script.cause, script.stats))  # type: ignore[arg-type]
    return events
