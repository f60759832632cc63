"""Builds each daemon's own frozen config from the settings; the only module that knows both sides.

Imported by the command of one daemon only, and each function imports that daemon's room alone.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from console.addresses import files_url_of, redis_url_of
from console.options import ConfigError
from console.settings import Settings, options

if TYPE_CHECKING:
    from api.batch.worker import BatchWorkerConfig
    from api.config import ApiConfig
    from broker.former.daemon import FormerConfig
    from workers.config import ScriptConfig, WorkerConfig


def api_config(settings: Settings) -> ApiConfig:
    """Raises: ConfigError, ApiConfigError."""
    from api.config import ApiConfig

    shared = _shared_fields(ApiConfig, settings)
    return ApiConfig(redis_url=redis_url_of(settings), files_url=files_url_of(settings), **shared)


def batch_worker_config(settings: Settings) -> BatchWorkerConfig:
    """Raises: ConfigError."""
    from api.batch.worker import BatchWorkerConfig

    shared = _shared_fields(BatchWorkerConfig, settings)
    return BatchWorkerConfig(redis_url=redis_url_of(settings), files_url=files_url_of(settings), **shared)


def former_config(settings: Settings) -> FormerConfig:
    """Raises: ConfigError."""
    from broker.former.daemon import FormerConfig
    from broker.former.policy import PolicyConfig

    policy = PolicyConfig(**_shared_fields(PolicyConfig, settings))
    return FormerConfig(redis_url=redis_url_of(settings), policy=policy, **_shared_fields(FormerConfig, settings))


def worker_config(settings: Settings, environ: Mapping[str, str]) -> WorkerConfig:
    """Raises: ConfigError."""
    from console.commands.fetch import cache_dir_of
    from mtplx_core.engine import Profile, SchedulerMode
    from workers.config import WorkerConfig

    shared = _shared_fields(WorkerConfig, settings)
    shared |= {"profile": Profile(settings.profile), "cache_dir": cache_dir_of(settings, environ)}
    return WorkerConfig(
        redis_url=redis_url_of(settings),
        name=socket.gethostname().partition(".")[0],
        mode=None if settings.scheduler_mode is None else SchedulerMode(settings.scheduler_mode),
        script=_script(settings),
        **shared,
    )


def _script(settings: Settings) -> ScriptConfig:
    from workers.config import ScriptConfig

    try:
        tokens_per_step = tuple(int(word) for word in settings.script_tokens_per_step.split(","))
    except ValueError as error:
        raise ConfigError(
            "script_tokens_per_step",
            settings.script_tokens_per_step,
            "allowed: whole numbers and commas",
            source="worker",
        ) from error
    return ScriptConfig(
        step_s=settings.script_step_s,
        prefill_token_s=settings.script_prefill_token_s,
        tokens_per_step=tokens_per_step,
        eos_position=settings.script_eos_position,
        crash_text=settings.script_crash_text or "",
        dead_text=settings.script_dead_text or "",
        hold=settings.script_hold,
    )


def _shared_fields(config: type[Any], settings: Settings) -> dict[str, Any]:
    """Options and config fields of one name are one thing; tests hold that their defaults agree."""
    return {each.name: settings[each.name] for each in fields(config) if each.name in options()}
