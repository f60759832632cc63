"""What a worker serves: a model described, an engine built for it, and the lane and card that say so to others.

Owns no Redis and no thread; a source's methods run on the engine's thread.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from broker.errors import WireError
from broker.vocabulary import ByteTable, byte_table
from broker.wire import Lane, ModelCard
from mtplx_core.engine import Engine, Geometry, SchedulerMode
from workers.config import WorkerConfig
from workers.jobs import Tongue

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """A model as its files describe it."""

    identity: str
    """`name@hash`."""
    name: str
    family: str
    """Architecture, the first word of a route."""
    vocab_size: int
    max_context_tokens: int
    """Longest sequence it was made for."""
    eos_token_ids: frozenset[int]
    tokenizer_files: Mapping[str, bytes]

    @property
    def tokenizer(self) -> str:
        """Hash of the tokenizer files, under which they are stored once."""
        digest = hashlib.sha256()
        for name, content in sorted(self.tokenizer_files.items()):
            digest.update(f"{name} {len(content)}\n".encode() + content)
        return digest.hexdigest()[:32]


class LaneSource(Protocol):
    """Where a lane's model and engine come from."""

    def describe(self) -> ServedModel:
        """Find the model and read what there is to know of it."""

    def build(self) -> Engine:
        """Load the weights and make the engine; `describe` ran before."""

    def release(self) -> None:
        """Let go of everything; nothing runs on the thread afterwards."""


def lane_of(model: ServedModel, geometry: Geometry, config: WorkerConfig, *, token_budget: int) -> Lane:
    """The lane's advertisement."""
    return Lane(
        model=model.identity,
        profile=config.profile,
        route=route_of(model.family, geometry, config),
        mode=config.mode,
        decode_batch_max=geometry.decode_batch_max,
        max_context_tokens=geometry.max_context_tokens,
        depth=geometry.depth,
        token_budget=token_budget,
    )


def route_of(family: str, geometry: Geometry, config: WorkerConfig) -> str:
    """Engine and shape in one word, such as `llama_ar_batch_b8_t1`."""
    engine = "scripted" if config.engine == "scripted" else config.mode.value
    depth = geometry.depth if config.mode is SchedulerMode.MTP_BATCH else 0
    return f"{family}_{engine}_b{geometry.decode_batch_max}_t{depth + 1}"


def card_of(model: ServedModel, geometry: Geometry, *, created_s: int) -> ModelCard:
    """What an API process needs to speak for the model."""
    return ModelCard(
        model=model.identity,
        name=model.name,
        tokenizer=model.tokenizer,
        max_context_tokens=geometry.max_context_tokens,
        created_s=created_s,
        vocab_size=model.vocab_size,
        eos_token_ids=tuple(sorted(model.eos_token_ids)),
    )


def tongue_of(model: ServedModel) -> Tongue:
    """The bytes of the model's tokens, where its tokenizer gives them bytes of their own."""
    return Tongue(_table(model), model.eos_token_ids)


def token_budget_of(engine: Engine, config: WorkerConfig) -> int:
    """Cache slots that fit the memory, all rows together; 0 where rows alone are the bound."""
    geometry = engine.geometry
    if config.token_budget:
        return config.token_budget
    slots = geometry.decode_batch_max * geometry.max_context_tokens
    row_bytes = engine.row_bytes(geometry.max_context_tokens)
    if not config.memory_bytes or row_bytes * geometry.decode_batch_max <= config.memory_bytes:
        return 0
    return min(slots, config.memory_bytes * geometry.max_context_tokens // row_bytes)


def _table(model: ServedModel) -> ByteTable | None:
    content = model.tokenizer_files.get(TOKENIZER_FILE)
    try:
        table = byte_table(content) if content is not None else None
    except WireError as error:
        logger.warning("%s: %s", model.identity, error)
        return None
    if table is None:
        logger.info("%s: no byte table for its tokenizer; API processes match stop strings", model.identity)
    return table
