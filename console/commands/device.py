"""`mtplx doctor --device`: the eight checks a device must pass before a lane is trusted to it, each with its figures.

The engine room does the work; this loads the model, shows the outcomes as they come, and keeps the table of forward
times where the lanes' depth policy looks for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import click

from console.commands.fetch import cache_dir_of
from console.options import ConfigError
from console.settings import Settings


def run_device_doctor(settings: Settings, environ: Mapping[str, str], *, as_json: bool) -> int:
    """Run the checks; returns the exit status, 1 if any failed.

    Raises:
        ConfigError: there is no model to check with.
        EngineError: it cannot be loaded.
    """
    from mtplx_core.blas import load_blas

    product = load_blas()

    from mtplx_core.device_checks import Check, run_device_checks
    from mtplx_core.engine import Geometry
    from mtplx_core.models.fetch import default_model_dir, is_fetched
    from mtplx_core.models.loader import load_model
    from mtplx_core.models.trunk import Trunk
    from mtplx_core.mtp.assemble import usual_depth

    cache_dir = cache_dir_of(settings, environ)
    if settings.model is None and not is_fetched(cache_dir):
        raise ConfigError("model", None, "run `mtplx fetch` first, or name a model", source="doctor --device")
    loaded = load_model(settings.model or default_model_dir(cache_dir), cache_dir=cache_dir)
    geometry = Geometry(
        settings.decode_batch_max,
        min(settings.max_context_tokens, loaded.max_context),
        usual_depth(Trunk(loaded.model)) if settings.depth is None else settings.depth,
        settings.prefill_chunk_tokens,
    )
    if not as_json:
        click.echo(f"{loaded.identity}, matrix products: {product}")
    checks: list[Check] = []
    for check in run_device_checks(loaded, geometry, probe_dir=cache_dir / "probes"):
        checks.append(check)
        if not as_json:
            click.echo(f"[{' ok ' if check.passed else 'FAIL'}] {check.name}: {check.figures}")
    if as_json:
        click.echo(json.dumps([check._asdict() for check in checks], indent=2))
    return 0 if all(check.passed for check in checks) else 1
