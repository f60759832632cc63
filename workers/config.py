"""What a worker is told once, at its start. Built by the command line; nothing here reads the environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mtplx_core.engine import USUAL_DEPTH, Geometry, Profile, SchedulerMode

EngineName = Literal["mlx", "scripted"]
GenerationConfigName = Literal["model", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptConfig:
    """How the scripted engine plays; for tests and drills."""

    step_s: float = 0.0
    """Seconds one decoding step takes."""
    prefill_token_s: float = 0.0
    tokens_per_step: tuple[int, ...] = (1,)
    """Tokens a row gets in its first, second, ... step, over and over."""
    eos_position: int | None = None
    """Position at which every completion ends by itself; None: never."""
    crash_text: str = ""
    """A prompt that holds this text kills the worker at its first token; empty: none does."""
    dead_text: str = ""
    """A prompt that holds this text makes the engine's step raise at its first token; empty: none does."""
    hold: Path | None = None
    """No step ends while this file exists; None: steps are never held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker."""

    redis_url: str
    name: str = "worker"
    """Part of the worker's id; a random part is added at every registration."""
    model: str | None = None
    """Model folder or hub id; None: the fetched default in `cache_dir`."""
    cache_dir: Path | None = None
    """Where fetched models and weight hashes are kept."""
    generation_config: GenerationConfigName = "model"
    """What fills in the sampling that a call leaves out: the model's `generation_config.json`, or nothing."""
    mode: SchedulerMode | None = None
    """None: `mtp_batch` where the model allows it, else `ar_batch`."""
    profile: Profile = Profile.BALANCED
    decode_batch_max: int = 8
    max_context_tokens: int = 2048
    """Prompt and completion of one row; the model's own bound if that is lower."""
    prefill_chunk_tokens: int = 512
    depth: int | None = None
    """Most tokens drafted per row and cycle, for the mode `mtp_batch` only; None: 7, or fewer where a GPU's fused
    attention takes fewer positions. A head drafts no deeper than it was made for."""
    head: Path | None = None
    """Folder of a head that drafts, for the mode `mtp_batch` only; without one it drafts from the row's own text."""
    token_budget: int = 0
    """Cache slots of all rows together; 0: derived from `memory_bytes`."""
    memory_bytes: int = 0
    """Memory that caches may take; 0: what this machine has left for them."""
    offline_age_ms: int = 600_000
    """Offline rows accepted longer ago give way to nobody."""
    min_run_ms: int = 5000
    """How long an offline row that gave way to interactive work runs undisturbed once it is back."""
    grace_s: float = 30.0
    """How long running rows may go on after SIGTERM before they are handed back."""
    lease_s: float = 5.0
    """After how long without a heartbeat others may take this worker for dead."""
    stall_s: float = 120.0
    """How long a step may take before this process gives itself up."""
    run_ahead_steps: int = 256
    """Steps decoded and not yet committed, at most; what rows may do while Redis is away."""
    engine: EngineName = "mlx"
    script: ScriptConfig = field(default_factory=ScriptConfig)

    @property
    def beat_every_s(self) -> float:
        return self.lease_s / 5

    @property
    def geometry(self) -> Geometry:
        """What the lane is asked to be; an engine may be narrower."""
        return Geometry(
            decode_batch_max=1 if self.mode is SchedulerMode.SERIAL else self.decode_batch_max,
            max_context_tokens=self.max_context_tokens,
            depth=self._depth if self.mode is SchedulerMode.MTP_BATCH else 0,
            prefill_chunk_tokens=self.prefill_chunk_tokens,
        )

    @property
    def _depth(self) -> int:
        return USUAL_DEPTH if self.depth is None else self.depth
