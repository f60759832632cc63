"""From settings to each daemon's config: nothing is lost or doubled on the way. Runs on no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from api.batch.worker import BatchWorkerConfig
from api.config import ApiConfig
from broker.embedded import server as embedded
from broker.former.daemon import FormerConfig
from broker.former.policy import PolicyConfig
from console.daemons import api_config, former_config, worker_config
from console.settings import ConfigError, Settings, options
from mtplx_core.engine import Profile, SchedulerMode
from workers.config import ScriptConfig, WorkerConfig

BUILT: Mapping[type[Any], set[str]] = {
    ApiConfig: {"redis_url", "files_url"},
    BatchWorkerConfig: {"redis_url", "files_url"},
    FormerConfig: {"redis_url", "policy", "tick_s", "wire"},
    PolicyConfig: set(),
    WorkerConfig: {"redis_url", "name", "mode", "script"},
    ScriptConfig: set(),
}
"""Fields that are not options of the same name."""


def option_name(config: type[Any], field: str) -> str:
    return f"script_{field}" if config is ScriptConfig else field


@pytest.mark.parametrize("config", list(BUILT), ids=lambda config: str(config.__name__))
def test_config_field_is_an_option_unless_it_is_built(config: type[Any]) -> None:
    loose = {each.name for each in fields(config) if option_name(config, each.name) not in options()}

    assert loose == BUILT[config]


@pytest.mark.parametrize("config", list(BUILT), ids=lambda config: str(config.__name__))
def test_config_field_has_the_default_of_its_option(config: type[Any]) -> None:
    defaults = {each.name: each.default for each in fields(config) if option_name(config, each.name) in options()}

    assert {name: _as_option(value) for name, value in defaults.items()} == {
        name: _as_option(options()[option_name(config, name)].default) for name in defaults
    }


def test_api_config_takes_what_was_set() -> None:
    config = api_config(Settings(redis="redis://x", port=81, keys_file=Path("/keys"), drain_s=3.0))

    assert (config.redis_url, config.port, config.keys_file, config.drain_s) == ("redis://x", 81, Path("/keys"), 3.0)


def test_former_config_takes_what_was_set() -> None:
    config = former_config(Settings(redis="redis://x", batch_wait_ms=7, lease_s=2.0))

    assert (config.redis_url, config.policy.batch_wait_ms, config.lease_s) == ("redis://x", 7, 2.0)


def test_worker_config_takes_what_was_set() -> None:
    settings = Settings(
        redis="redis://x",
        scheduler_mode="serial",
        profile="b1-exact",
        script_tokens_per_step="1,3",
        generation_config="none",
    )

    config = worker_config(settings, {"HOME": "/home/someone"})

    assert (config.mode, config.profile) == (SchedulerMode.SERIAL, Profile.B1_EXACT)
    assert (config.script.tokens_per_step, config.generation_config) == ((1, 3), "none")


def test_worker_config_refuses_tokens_per_step_that_are_not_numbers() -> None:
    with pytest.raises(ConfigError, match="script_tokens_per_step = '1,x'"):
        worker_config(Settings(redis="redis://x", script_tokens_per_step="1,x"), {})


def test_config_finds_the_broker_of_a_running_up(tmp_path: Path) -> None:
    layout = embedded.Layout(tmp_path)
    with embedded.owned(layout):
        embedded.write_runtime(layout, embedded.Runtime(redis_url="unix:///there", api_url="", pid=1))

        assert former_config(Settings(data_dir=tmp_path)).redis_url == "unix:///there"


def test_config_is_refused_when_there_is_no_broker(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="redis is missing; needed, because no mtplx up runs"):
        former_config(Settings(data_dir=tmp_path))


def _as_option(value: object) -> object:
    """None and the empty text both say that nothing was set; one token per step is spelled `1`."""
    match value:
        case "" | None:
            return None
        case (int(only),):
            return str(only)
        case _:
            return value


def test_worker_config_looks_for_the_default_model_where_fetch_puts_it() -> None:
    config = worker_config(Settings(redis="redis://x"), {"XDG_CACHE_HOME": "/caches"})

    assert config.cache_dir == Path("/caches/mtplx")
