"""A lane with a model: what mlx-lm loads from a folder or hub id, and the engine of the configured mode.

MLX is imported by the methods, that is on the engine's thread: the import takes seconds, and the worker is registered
and beats by then.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mtplx_core.engine import Engine, SchedulerMode
from mtplx_core.errors import ModelLoadError
from mtplx_core.models.fetch import DEFAULT_MODEL, default_model_dir, is_fetched
from workers.config import WorkerConfig
from workers.errors import LaneError
from workers.lane import ServedModel, settled

if TYPE_CHECKING:
    from mtplx_core.heads.base import Head
    from mtplx_core.models.loader import LoadedModel

logger = logging.getLogger(__name__)


class MlxLane:
    """A lane source over a model folder; use it on one thread."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._is_mode_asked_for = config.mode is not None
        self._loaded: LoadedModel | None = None
        self.memory_bytes = config.memory_bytes
        self.mode = config.mode
        self.refusals: Mapping[str, str] = {}

    def describe(self) -> ServedModel:
        from mtplx_core.models.loader import load_model
        from mtplx_core.models.trunk import unsupported_reason

        self._loaded = loaded = load_model(self._folder(), cache_dir=self._config.cache_dir, is_lazy=True)
        model = ServedModel(
            identity=loaded.identity,
            name=loaded.name,
            family=str(loaded.config.get("model_type", "model")),
            vocab_size=loaded.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            tokenizer_files=loaded.tokenizer_files,
            max_context_tokens=loaded.max_context,
            mtp_refusal=unsupported_reason(loaded.model) or "",
        )
        self._config = settled(self._config, model)
        return model

    def build(self) -> Engine:
        from mtplx_core.build import build_engine
        from mtplx_core.models.loader import read_weights, weight_bytes
        from mtplx_core.models.memory import plan_this_machine
        from mtplx_core.models.trunk import Trunk
        from mtplx_core.mtp.assemble import usual_depth

        assert self._loaded is not None, "describe() comes first"
        read_weights(self._loaded)
        self._choose_mode(self._loaded)
        config = self._config
        if not self.memory_bytes:
            self.memory_bytes = plan_this_machine(weight_bytes=weight_bytes(self._loaded)).rows
        assert config.mode is not None, "describe() settles it"
        head = self._find_head() if config.mode is SchedulerMode.MTP_BATCH else None
        geometry = config.geometry
        if config.mode is SchedulerMode.MTP_BATCH and config.depth is None:
            geometry = replace(geometry, depth=usual_depth(Trunk(self._loaded.model)))
        return build_engine(
            config.mode,
            self._loaded,
            geometry=geometry,
            profile=config.profile,
            head=head,
            probe_dir=None if config.cache_dir is None else config.cache_dir / "probes",
            memory_bytes=max(self.memory_bytes, 1),
        )

    def _choose_mode(self, loaded: LoadedModel) -> None:
        """Fall back to a mode that says what the model says, unless one was asked for.

        Raises:
            UnsupportedModeError: no mode does, or not the one that was asked for.
        """
        from mtplx_core.build import FALLBACKS, choose_mode

        config = self._config
        assert config.mode is not None, "describe() settles it"
        modes = (config.mode,) if self._is_mode_asked_for else FALLBACKS[FALLBACKS.index(config.mode) :]
        self.mode, refusals = choose_mode(loaded, modes, profile=config.profile)
        self.refusals = {mode.value: reason for mode, reason in refusals.items()}
        self._config = replace(config, mode=self.mode)

    def _find_head(self) -> Head | None:
        """Raises: ModelLoadError where somebody asked for drafting and there is a head that is no use."""
        from mtplx_core.mtp.assemble import find_head

        assert self._loaded is not None
        try:
            return find_head(self._config.head, self._loaded)
        except ModelLoadError as error:
            if self._is_mode_asked_for or self._config.head is not None:
                raise
            logger.warning("%s drafts from its rows' own text only: %s", self._loaded.name, error)
            return None

    def release(self) -> None:
        if "mlx.core" not in sys.modules:
            return
        import mlx.core as mx

        self._loaded = None
        # Streams that die with their thread, while the process ends, abort it now and then.
        mx.clear_streams()

    def _folder(self) -> str | Path:
        if self._config.model is not None:
            return self._config.model
        cache_dir = self._config.cache_dir
        if cache_dir is None:
            raise LaneError("neither model nor cache_dir is set; name a model folder, a hub id or a cache directory")
        if not is_fetched(cache_dir):
            raise ModelLoadError(f"the default model {DEFAULT_MODEL} is not in {cache_dir}; run `mtplx fetch`")
        return default_model_dir(cache_dir)
