"""What a worker serves: a model described, an engine built for it, and the lane and card that say so to others.

Owns no Redis and no thread; a source's methods run on the engine's thread.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from broker.errors import WireError
from broker.text.token_bytes import ByteTable, byte_table
from broker.wire import WIRE_VERSION, Lane, ModelCard, SamplingDefaults
from mtplx_core.engine import Engine, Geometry, SchedulerMode
from mtplx_core.models.generation_config import read_generation_config
from workers.config import WorkerConfig
from workers.jobs import TokenDecoder
from workers.row_scheduler import SchedulerRules

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
    mtp_refusal: str = ""
    """Why the mode `mtp_batch` cannot run it; empty where it can."""

    @property
    def tokenizer(self) -> str:
        """Hash of the tokenizer files, under which they are stored once."""
        digest = hashlib.sha256()
        for name, content in sorted(self.tokenizer_files.items()):
            digest.update(f"{name} {len(content)}\n".encode() + content)
        return digest.hexdigest()[:32]


class LaneSource(Protocol):
    """Where a lane's model and engine come from."""

    @property
    def memory_bytes(self) -> int:
        """What the caches of all rows may take, known once the engine is built; 0: no bound."""

    @property
    def mode(self) -> SchedulerMode | None:
        """The mode of the engine that was built, which may be another than the settled one; None: that one."""

    @property
    def refusals(self) -> Mapping[str, str]:
        """Why each mode that would have come first is not the one, known once the engine is built."""

    def describe(self) -> ServedModel:
        """Find the model and read what there is to know of it."""

    def build(self) -> Engine:
        """Load the weights and make the engine; `describe` ran before."""

    def release(self) -> None:
        """Let go of everything; nothing runs on the thread afterwards."""


def settled(config: WorkerConfig, model: ServedModel) -> WorkerConfig:
    """The config with a mode: the one asked for, or else the best that the model allows."""
    if config.mode is not None:
        return config
    drafts = not model.mtp_refusal and config.engine == "mlx"
    return replace(config, mode=SchedulerMode.MTP_BATCH if drafts else SchedulerMode.AR_BATCH)


def lane_of(model: ServedModel, geometry: Geometry, config: WorkerConfig, *, token_budget: int) -> Lane:
    """The lane's advertisement."""
    return Lane(
        model=model.identity,
        profile=config.profile,
        route=route_of(model.family, geometry, config),
        mode=_mode(config),
        decode_batch_max=geometry.decode_batch_max,
        max_context_tokens=geometry.max_context_tokens,
        depth=geometry.depth,
        token_budget=token_budget,
        wire=WIRE_VERSION,
    )


def route_of(family: str, geometry: Geometry, config: WorkerConfig) -> str:
    """Engine and shape in one word, such as `llama_ar_batch_b8_t1`."""
    mode = _mode(config)
    engine = "scripted" if config.engine == "scripted" else mode.value
    depth = geometry.depth if mode is SchedulerMode.MTP_BATCH else 0
    return f"{family}_{engine}_b{geometry.decode_batch_max}_t{depth + 1}"


def card_of(model: ServedModel, geometry: Geometry, config: WorkerConfig, *, created_s: int) -> ModelCard:
    """What an API process needs to speak for the model."""
    return ModelCard(
        model=model.identity,
        name=model.name,
        tokenizer=model.tokenizer,
        max_context_tokens=geometry.max_context_tokens,
        created_s=created_s,
        vocab_size=model.vocab_size,
        eos_token_ids=tuple(sorted(model.eos_token_ids)),
        defaults=_defaults(model) if config.generation_config == "model" else SamplingDefaults(),
    )


def tongue_of(model: ServedModel) -> TokenDecoder:
    """The bytes of the model's tokens, where its tokenizer gives them bytes of their own."""
    return TokenDecoder(_table(model), model.eos_token_ids)


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


def place_rules_of(engine: Engine, config: WorkerConfig) -> SchedulerRules:
    """Who gives way on this engine. Where rows are the bound, paused ones may have the memory that is left."""
    geometry = engine.geometry
    paused_tokens = None
    if config.memory_bytes and not token_budget_of(engine, config):
        row_bytes = engine.row_bytes(geometry.max_context_tokens)
        left = config.memory_bytes - row_bytes * geometry.decode_batch_max
        paused_tokens = left * geometry.max_context_tokens // row_bytes
    return SchedulerRules(
        width=geometry.decode_batch_max,
        offline_age_s=config.offline_age_ms / 1000,
        min_run_s=config.min_run_ms / 1000,
        paused_tokens=paused_tokens,
    )


def memory_of(engine: Engine, config: WorkerConfig) -> dict[str, int]:
    """What the memory of this machine comes to, for the heartbeat: rows carried may be fewer than rows asked for."""
    if not config.memory_bytes:
        return {}
    geometry = engine.geometry
    return {
        "limit_bytes": config.memory_bytes,
        "row_bytes": engine.row_bytes(geometry.max_context_tokens),
        "rows_asked": config.geometry.decode_batch_max,
        "rows_carried": geometry.decode_batch_max,
    }


def _defaults(model: ServedModel) -> SamplingDefaults:
    said = read_generation_config(model.tokenizer_files)
    return SamplingDefaults(
        temperature=said.temperature,
        top_p=said.top_p,
        top_k=said.top_k,
        min_p=said.min_p,
        repetition_penalty=said.repetition_penalty,
        max_tokens=said.max_new_tokens,
    )


def _mode(config: WorkerConfig) -> SchedulerMode:
    assert config.mode is not None, "settle the config first"
    return config.mode


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
