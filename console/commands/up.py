"""`mtplx up`: which processes one machine runs, in which order, and what the person at the terminal is told.

The supervisor keeps the processes; the daemons do the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import urllib.error
from collections.abc import Iterator, Mapping
from dataclasses import replace

import click

from broker.connection.entrance import enter
from broker.embedded import server as embedded
from console.addresses import api_url_of, layout_of
from console.options import ConfigError
from console.settings import Settings, as_environ
from console.supervisor import ChildSpec, Supervisor, SupervisorError, mtplx_command, stop_on_signals
from console.web import open_url

STOP_MARGIN_S = 10.0
"""What a daemon gets to end in, beyond the time it gives to running rows or open streams."""
HEALTH_EVERY_S = 0.25


def run_up(settings: Settings, environ: Mapping[str, str]) -> None:
    """Run everything until Ctrl-C or SIGTERM.

    Raises:
        ConfigError: the port is taken.
        BrokerConfigError: the data directory is in use, or the Redis that was named refuses us.
        SupervisorError: a process cannot be kept running.
    """
    _check(settings)
    if settings.redis is not None and not asyncio.run(enter(settings.redis, who="mtplx up")):
        return
    settings = replace(settings, port=_free_port(settings.host, settings.port))
    if settings.engine == "mlx" and settings.model is None and settings.workers > 0:
        _fetch(as_environ(settings, environ))
    with _broker(settings) as (url, broker_specs):
        daemons = _daemon_specs(replace(settings, redis=url), environ)
        asyncio.run(_supervise(Supervisor([*broker_specs, *daemons]), settings))


def join_command(settings: Settings) -> str:
    """What to type on another machine, in its folder of MTPLX, to decode for this one; the broker is owned here."""
    url = embedded.shared_url(layout_of(settings), host=settings.share_host or _own_address(), port=settings.share_port)
    # A variable, because everybody on that machine can read a process's flags.
    return f"MTPLX_REDIS='{url}' .venv/bin/mtplx worker"


def _own_address() -> str:
    """The address by which this machine reaches others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing; it only picks the interface.
            probe.connect(("10.255.255.255", 1))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()


def _check(settings: Settings) -> None:
    if not settings.share:
        return
    if settings.redis is not None:
        allowed = "only the embedded broker can be shared; leave --redis out, or give other machines that URL"
        raise ConfigError("share", True, allowed, source="up")
    _free_port("0.0.0.0", settings.share_port)


def _fetch(environ: Mapping[str, str]) -> None:
    """In a process of its own, because converting a model takes memory that the supervisor would keep."""
    if subprocess.run([*mtplx_command("fetch"), "--quiet"], env=environ).returncode != 0:
        raise SupervisorError("the default model could not be fetched; see above, or name another one with --model")


@contextlib.contextmanager
def _broker(settings: Settings) -> Iterator[tuple[str, list[ChildSpec]]]:
    """The Redis URL, and the process to run for it if the broker is ours."""
    if settings.redis is not None:
        yield settings.redis, []
        return
    layout = layout_of(settings)
    with embedded.owned(layout):
        url = embedded.redis_url(layout)
        embedded.write_runtime(layout, embedded.Runtime(redis_url=url, api_url=api_url_of(settings), pid=os.getpid()))
        if settings.share:
            where = "another machine joins with this command, in the folder where make install was run"
            click.echo(f"mtplx: {where}:\n\n  {join_command(settings)}\n", err=True)
        spec = ChildSpec(
            name="broker",
            command=embedded.server_command(layout, tcp_port=settings.share_port if settings.share else 0),
            environ={"PATH": os.defpath},
            is_ready=lambda: embedded.answers(layout),
            explain=lambda: embedded.last_words(layout),
        )
        yield url, [spec]


def _daemon_specs(settings: Settings, environ: Mapping[str, str]) -> list[ChildSpec]:
    inherited = as_environ(settings, environ)
    workers = [f"worker {number}" for number in range(1, settings.workers + 1)]
    give_s = {"api": settings.drain_s} | dict.fromkeys(workers, settings.grace_s)
    return [
        ChildSpec(
            name=name,
            command=mtplx_command(name.partition(" ")[0], "--with-parent"),
            environ=inherited,
            stop_within_s=give_s.get(name, 0.0) + STOP_MARGIN_S,
            is_optional=name == "batch-worker",  # chat needs none
        )
        for name in ("former", *workers, "batch-worker", "api")
    ]


async def _supervise(supervisor: Supervisor, settings: Settings) -> None:
    stop_on_signals(asyncio.get_running_loop(), lambda: _stop(supervisor))
    click.echo(f"mtplx: starting {', '.join(child.spec.name for child in supervisor.children)}", err=True)
    await supervisor.run(lambda: _announce(api_url_of(settings), workers=settings.workers))


def _stop(supervisor: Supervisor) -> None:
    if not supervisor.is_stopping:
        click.echo(
            "mtplx: stopping, once open streams and running rows have ended; once more to hand them back now", err=True
        )
    supervisor.stop()


async def _announce(url: str, *, workers: int) -> None:
    """Say what is being waited for, and the URL once everything answers."""
    waiting = {
        "starting": "loading the model" if workers else "no worker here; waiting for one to join",
        "stalled": "waiting for Redis",
    }
    said = ""
    while (word := await asyncio.to_thread(read_health, url)) != "healthy":
        if word not in {"", said}:
            click.echo(f"mtplx: {waiting.get(word, word)}", err=True)
            said = word
        await asyncio.sleep(HEALTH_EVERY_S)
    click.echo(f"mtplx: ready at {url} - chat page in the browser, OpenAI API under {url}/v1; Ctrl-C stops", err=True)


def read_health(url: str) -> str:
    """The word the API has for its health; empty while it does not answer."""
    try:
        with open_url(f"{url}/health", timeout_s=5) as reply:
            return _status_word(reply.read())
    except urllib.error.HTTPError as error:
        with error:
            return _status_word(error.read())
    except OSError:
        return ""


def _status_word(body: bytes) -> str:
    try:
        return str(json.loads(body)["status"])
    except (ValueError, KeyError, TypeError):
        return ""


def _free_port(host: str, port: int) -> int:
    """The port itself if it can be had, or a free one for 0.

    Raises:
        ConfigError: it is taken, or the address is not of this machine.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        allowed = f"a free port of this machine ({error.strerror or error})"
        raise ConfigError("host, port", f"{host}:{port}", allowed, source="up") from error
