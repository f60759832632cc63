"""`mtplx status` and `mtplx top`: an overview as JSON, as tables, or as a live view in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from broker.errors import BrokerUnavailableError
from console.overview import (
    BATCH_WORKER,
    BatchView,
    DaemonView,
    LaneView,
    Overview,
    QueueView,
    ServerView,
    take_overview,
)

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
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=Console(), screen=True, auto_refresh=False) as live,
    ):
        while True:
            live.update(_look(url, rates), refresh=True)
            wait(TOP_EVERY_S)


@dataclass(frozen=True, slots=True)
class Speed:
    """What happened per second between two looks."""

    ended_per_s: float
    tokens_per_s: Mapping[str, float]
    """By worker id."""


class Rates:
    """Turns counters of successive looks into speeds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: tuple[float, Overview] | None = None

    def look(self, overview: Overview) -> Speed | None:
        """None at the first look."""
        now_s, last = self._clock(), self._last
        self._last = now_s, overview
        if last is None or now_s <= last[0]:
            return None
        seconds, before, after = now_s - last[0], _tokens(last[1]), _tokens(overview)
        ended = sum(overview.queue.ended.values()) - sum(last[1].queue.ended.values())
        rates = {worker: (count - before[worker]) / seconds for worker, count in after.items() if worker in before}
        return Speed(ended / seconds, rates)


def render(overview: Overview, *, speed: Speed | None = None) -> RenderableType:
    """The overview for a person."""
    parts: list[RenderableType] = [_server_line(overview.server), _queue_line(overview.queue, speed)]
    parts.append(Text("daemons: " + ", ".join(_daemon_name(daemon) for daemon in overview.daemons), style="dim"))
    if not overview.lanes:
        parts.append(Text("no workers: nothing decodes", style="bold red"))
    parts.extend(_lane_table(lane, speed) for lane in overview.lanes)
    parts.extend(_batch_line(batch) for batch in overview.batches)
    return Group(*parts)


def _daemon_name(daemon: DaemonView) -> str:
    return f"{daemon.kind} {daemon.id}" if daemon.kind == BATCH_WORKER else daemon.id


def _batch_line(batch: BatchView) -> Text:
    done = batch.completed + batch.failed
    text = Text(f"{batch.id}  {batch.status}  {done}/{batch.total} lines")
    if batch.failed:
        text.append(f", {batch.failed} failed", style="yellow")
    if batch.waits_for:
        text.append(f"  waits: {batch.waits_for}", style="yellow")
    return text


def _tokens(overview: Overview) -> dict[str, int]:
    return {worker.id: worker.tokens_committed for lane in overview.lanes for worker in lane.workers}


def _look(url: str, rates: Rates) -> RenderableType:
    try:
        overview = asyncio.run(take_overview(url))
    except BrokerUnavailableError as error:
        return Text(str(error), style="bold red")
    return render(overview, speed=rates.look(overview))


def _server_line(server: ServerView) -> Text:
    policy = server.persistence.policy
    style = "green" if policy == "always" else "yellow"
    text = Text(f"redis {server.version} at {server.url}, {server.used_memory_bytes / 1e6:.1f} MB, persistence ")
    return text.append(policy, style=style).append(f": {server.persistence.means}", style="dim")


def _queue_line(queue: QueueView, speed: Speed | None) -> Text:
    waiting = ", ".join(f"{count} {name}" for name, count in queue.waiting.items())
    text = Text(f"requests: {sum(queue.requests.values())} live, of these in line: {waiting}; ")
    text.append(f"{sum(queue.ended.values())} ended")
    if speed is not None:
        text.append(f" ({speed.ended_per_s:.1f}/s)")
    if queue.dead_letters:
        text.append(f", {queue.dead_letters} dead letters", style="bold red")
    return text


def _lane_table(lane: LaneView, speed: Speed | None) -> Table:
    title = f"{lane.lane}  {lane.rows_active}/{lane.rows} rows"
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("worker", "host", "pid", "phase", "rows", "tokens", "tokens/s"):
        table.add_column(column, justify="right" if column.startswith("tokens") else "left")
    for worker in lane.workers:
        phase = worker.phase if worker.is_accepting else f"{worker.phase}, not accepting"
        bar = "█" * worker.rows_active + "░" * max(0, worker.rows - worker.rows_active)
        rate = speed.tokens_per_s.get(worker.id) if speed is not None else None
        shown = "" if rate is None else f"{rate:.0f}"
        paused = f", {worker.rows_paused} paused" if worker.rows_paused else ""
        rows = f"{bar} {worker.rows_active}/{worker.rows}{paused}"
        table.add_row(worker.id, worker.host, worker.pid, phase, rows, str(worker.tokens_committed), shown)
    return table
