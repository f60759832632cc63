"""Where things are on this machine: the embedded broker's directory, the Redis to use, the API's URL."""

from __future__ import annotations

from pathlib import Path

from broker.embedded.server import Layout, default_data_dir, find_runtime
from console.options import ConfigError
from console.settings import Settings


def layout_of(settings: Settings) -> Layout:
    """The embedded broker's layout under the settings' data directory."""
    return Layout((settings.data_dir or default_data_dir(home=Path.home())).absolute())


def redis_url_of(settings: Settings) -> str:
    """The Redis that was named, or the embedded broker of a running `mtplx up`.

    Raises:
        ConfigError: none was named and none runs.
    """
    if settings.redis is not None:
        return settings.redis
    layout = layout_of(settings)
    runtime = find_runtime(layout)
    if runtime is None:
        allowed = f"needed, because no mtplx up runs with data directory {layout.data_dir}; allowed: any redis-py URL"
        raise ConfigError("redis", None, allowed, source="broker")
    return runtime.redis_url


def files_url_of(settings: Settings) -> str:
    """Where contents of files lie: the place that was named, or the data directory."""
    return settings.file_store or str(layout_of(settings).data_dir / "files")


def running_api_url(settings: Settings) -> str | None:
    """Where the API of a running `mtplx up` answers; None when none runs."""
    runtime = find_runtime(layout_of(settings))
    return None if runtime is None else runtime.api_url


def api_url_of(settings: Settings) -> str:
    """Where a person on this machine reaches the API."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)
    return f"http://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{settings.port}"
