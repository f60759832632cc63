"""`mtplx status` and `mtplx top`: an overview as JSON, as tables, or as a live view in the terminal."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from broker.errors import BrokerUnavailableError
from console.overview import LaneView, Overview, QueueView, ServerView, take_overview

TOP_EVERY_S = 1.0


def run_status(url: str, *, as_json: bool) -> None:
    """Print one overview.

    Raises:
        BrokerError: Redis cannot be read.
    """
    overview = asyncio.run(take_overview(url))
    if as_json:
        click.echo(json.dumps(overview.as_json(), indent=2))
    else:
        Console().print(render(overview))


def run_top(url: str, *, wait: Callable[[float], None] = time.sleep) -> None:
    """Show the overview anew every second until Ctrl-C, through outages of Redis too."""
    rates = Rates()
    with Live(console=Console(), screen=True, auto_refresh=False) as live:
        while True:
            live.update(_look(url, rates), refresh=True)
            wait(TOP_EVERY_S)


class Rates:
    """How many requests ended per second between two looks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: tuple[float, int] | None = None

    def ended_per_s(self, queue: QueueView) -> float | None:
        """None at the first look."""
        now_s, ended = self._clock(), sum(queue.ended.values())
        last, self._last = self._last, (now_s, ended)
        if last is None or now_s <= last[0]:
            return None
        return (ended - last[1]) / (now_s - last[0])


def render(overview: Overview, *, ended_per_s: float | None = None) -> RenderableType:
    """The overview for a person."""
    parts: list[RenderableType] = [_server_line(overview.server), _queue_line(overview.queue, ended_per_s)]
    parts.append(Text("  ".join(f"{daemon.kind} {daemon.id}" for daemon in overview.daemons), style="dim"))
    if not overview.lanes:
        parts.append(Text("no workers: nothing decodes", style="bold red"))
    parts.extend(_lane_table(lane) for lane in overview.lanes)
    return Group(*parts)


def _look(url: str, rates: Rates) -> RenderableType:
    try:
        overview = asyncio.run(take_overview(url))
    except BrokerUnavailableError as error:
        return Text(str(error), style="bold red")
    return render(overview, ended_per_s=rates.ended_per_s(overview.queue))


def _server_line(server: ServerView) -> Text:
    policy = server.persistence.policy
    style = "green" if policy == "always" else "yellow"
    text = Text(f"redis {server.version} at {server.url}, {server.used_memory_bytes / 1e6:.1f} MB, persistence ")
    return text.append(policy, style=style).append(f": {server.persistence.means}", style="dim")


def _queue_line(queue: QueueView, ended_per_s: float | None) -> Text:
    waiting = ", ".join(f"{count} {name}" for name, count in queue.waiting.items())
    live = sum(queue.requests.values())
    text = Text(f"requests: {live} live, waiting entries: {waiting}, ended {sum(queue.ended.values())}")
    if ended_per_s is not None:
        text.append(f" ({ended_per_s:.1f}/s)")
    if queue.dead_letters:
        text.append(f", {queue.dead_letters} dead letters", style="bold red")
    return text


def _lane_table(lane: LaneView) -> Table:
    title = f"{lane.lane}  {lane.rows_active}/{lane.rows} rows"
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("worker", "host", "pid", "phase", "rows"):
        table.add_column(column)
    for worker in lane.workers:
        phase = worker.phase if worker.is_accepting else f"{worker.phase}, not accepting"
        bar = "█" * worker.rows_active + "░" * max(0, worker.rows - worker.rows_active)
        table.add_row(worker.id, worker.host, worker.pid, phase, f"{bar} {worker.rows_active}/{worker.rows}")
    return table
