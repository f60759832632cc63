"""The command line. The only place that knows all four rooms; imports each only when its command runs."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import click

from console import settings as configuration
from console.flags import takes
from console.settings import Settings
from console.supervisor import EXIT_CONFIG, SupervisorError, end_with_parent

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Entry point: run a command; turn errors a person can act on into one line and an exit status.

    Args:
        words: the command line, without the program; that of the process by default.
    """
    from broker.errors import BrokerConfigError, BrokerDeniedError, BrokerError
    from mtplx_core.errors import EngineError

    try:
        cli.main(words, standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except (configuration.ConfigError, BrokerConfigError, BrokerDeniedError) as error:
        _fail(error, EXIT_CONFIG)
    except EngineError as error:
        _fail(error, EXIT_CONFIG if _is_final(error) else 1)
    except (BrokerError, SupervisorError) as error:
        _fail(error, 1)
    sys.exit(0)


_ELSEWHERE = {
    "forge": "console.commands.forge",
    "inspect": "console.commands.inspect",
    "run": "console.commands.offline",
    "batch": "console.commands.offline",
    "dead": "console.commands.offline",
}
"""Commands that lie in a module of their own, read only when one of them is asked for."""


class _Commands(click.Group):
    """Also knows the commands that lie elsewhere."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_ELSEWHERE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(import_module(_ELSEWHERE[cmd_name]), cmd_name)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mtplx")
def cli() -> None:
    """Several Macs behind one endpoint: a durable queue, cohorts, and batched multi-token prediction.

    Every option can also be an MTPLX_ variable (--batch-wait-ms: MTPLX_BATCH_WAIT_MS) or a key of mtplx.toml
    (batch_wait_ms); a flag goes before a variable, a variable before the file.
    """


@cli.command()
@takes(configuration.UP, *configuration.DAEMONS)
def up(**flags: object) -> None:
    """Run everything on this machine: broker, former, worker and API."""
    from console.commands.up import run_up

    settings = _settings(flags)
    _log_to_stderr(settings)
    run_up(settings, os.environ)


@cli.command()
@takes(configuration.API)
@click.option("--with-parent", is_flag=True, hidden=True)
def api(*, with_parent: bool, **flags: object) -> None:
    """Run the HTTP API alone."""
    settings = _begin(flags, with_parent=with_parent)

    import uvloop

    from api.errors import ApiConfigError
    from api.serve import run_api
    from console.daemons import api_config

    try:
        uvloop.run(run_api(api_config(settings)))
    except ApiConfigError as error:
        _fail(error, EXIT_CONFIG)


@cli.command()
@takes(configuration.FORMER)
@click.option("--with-parent", is_flag=True, hidden=True)
def former(*, with_parent: bool, **flags: object) -> None:
    """Run the cohort former alone."""
    settings = _begin(flags, with_parent=with_parent)

    from broker.former.daemon import run_former
    from console.daemons import former_config

    asyncio.run(run_former(former_config(settings)))


@cli.command()
@takes(configuration.WORKER)
@click.option("--with-parent", is_flag=True, hidden=True)
def worker(*, with_parent: bool, **flags: object) -> None:
    """Run one worker: load the model and decode what the former sends."""
    settings = _begin(flags, with_parent=with_parent)

    from console.daemons import worker_config
    from console.keep_awake import keep_awake
    from workers.daemon import run_worker
    from workers.errors import LaneError, WorkerError

    keep_awake()
    try:
        asyncio.run(run_worker(worker_config(settings, os.environ)))
    except WorkerError as error:
        _fail(error, EXIT_CONFIG if isinstance(error, LaneError) else 1)


@cli.command("batch-worker")
@takes(configuration.BATCH)
@click.option("--with-parent", is_flag=True, hidden=True)
@click.option("--burst", is_flag=True, help="End when no batch is queued.")
def batch_worker(*, with_parent: bool, burst: bool, **flags: object) -> None:
    """Run batches: an RQ worker that feeds the queue from files and writes the answers down."""
    settings = _begin(flags, with_parent=with_parent)

    from api.batch.worker import run_batch_worker
    from api.errors import ApiConfigError
    from console.daemons import batch_worker_config

    try:
        run_batch_worker(batch_worker_config(settings), is_burst=burst)
    except ApiConfigError as error:
        _fail(error, EXIT_CONFIG)


@cli.command()
@takes(configuration.FETCH)
@click.option("--quiet", is_flag=True, help="Say nothing when the model is already there.")
def fetch(*, quiet: bool, **flags: object) -> None:
    """Bring the default model, SmolLM2-135M-Instruct, into the cache."""
    from console.commands.fetch import run_fetch

    run_fetch(_settings(flags), os.environ, quiet=quiet)


@cli.command()
@click.argument("name")
@takes(configuration.KEY)
def key(*, name: str, **flags: object) -> None:
    """Make an API key; it is shown once, and its hash goes to the keys file."""
    from console.commands.keys import run_key

    run_key(name, keys_file=_settings(flags).keys_file)


@cli.command()
@takes(configuration.LOOK)
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def status(*, as_json: bool, **flags: object) -> None:
    """Show workers, lanes, queues, rows and how Redis persists."""
    from console.addresses import redis_url_of
    from console.commands.status import run_status

    run_status(redis_url_of(_settings(flags)), as_json=as_json)


@cli.command()
@takes(configuration.LOOK)
def top(**flags: object) -> None:
    """Show the same, live, until Ctrl-C."""
    from console.addresses import redis_url_of
    from console.commands.status import run_top

    run_top(redis_url_of(_settings(flags)))


@cli.command()
@takes(configuration.LOOK)
@click.option("--json", "as_json", is_flag=True, help="As one JSON list.")
@click.option("--device", is_flag=True, help="Check the device with the model instead: eight checks, some minutes.")
def doctor(*, as_json: bool, device: bool, **flags: object) -> None:
    """Check the machine, the model, Redis and the daemons, and say what to do about each problem."""
    if device:
        from console.commands.device import run_device_doctor

        sys.exit(run_device_doctor(_settings(flags), os.environ, as_json=as_json))
    from console.commands.doctor import run_doctor

    sys.exit(run_doctor(_settings(flags), os.environ, as_json=as_json))


def _begin(flags: Mapping[str, object], *, with_parent: bool) -> Settings:
    """What every daemon does first."""
    if with_parent:
        end_with_parent()
    settings = _settings(flags)
    _log_to_stderr(settings)
    return settings


def _settings(flags: Mapping[str, object]) -> Settings:
    return configuration.load(flags, environ=os.environ, directory=Path.cwd())


def _log_to_stderr(settings: Settings) -> None:
    logging.basicConfig(level=settings.log_level.upper(), format=LOG_FORMAT, stream=sys.stderr)
    # Its life events repeat ours, and tell a child of `up` to press Ctrl-C.
    logging.getLogger("uvicorn").setLevel("WARNING")


def _is_final(error: Exception) -> bool:
    from mtplx_core.errors import ModelLoadError, UnsupportedModeError

    return isinstance(error, ModelLoadError | UnsupportedModeError)


def _fail(error: Exception, status: int) -> NoReturn:
    click.echo(f"mtplx: {error}", err=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
