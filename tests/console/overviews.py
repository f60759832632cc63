"""Overviews made up for the tests of what is shown and judged."""

from __future__ import annotations

from collections.abc import Sequence

from broker.registry import DaemonRecord
from broker.wire import Lane
from console.overview import DaemonView, LaneView, Overview, QueueView, ServerView, lanes_of
from console.persistence import judge_persistence

LANE = Lane("smol@1234", "balanced", "llama_ar_batch_b8_t1", "ar_batch", decode_batch_max=8, max_context_tokens=2048)
ALWAYS = {"appendonly": "yes", "appendfsync": "always", "save": ""}


def worker(
    name: str, *, lane: Lane = LANE, active: int = 0, tokens: int = 0, is_accepting: bool = True
) -> DaemonRecord:
    return DaemonRecord(
        id=name,
        kind="worker",
        beat=1,
        fields={
            "host": f"{name}.local",
            "pid": "7",
            "phase": "serving",
            "snapshot": f'{{"tokens_committed": {tokens}}}',
        },
        lane=lane,
        free_rows=lane.decode_batch_max - active,
        is_accepting=is_accepting,
        active_rows=active,
    )


def server(*, version: str = "7.2.0", eviction: str = "noeviction", config: dict[str, str] | None = None) -> ServerView:
    persistence = judge_persistence(ALWAYS if config is None else config)
    return ServerView("redis://:***@queue:6379", version, 60, 2_000_000, eviction, persistence)


def queue(*, ended: int = 0, dead_letters: int = 0) -> QueueView:
    waiting = {"interactive": 3, "offline": 0, "returned": 0}
    return QueueView(waiting, {"interactive": 5}, {"interactive": 500}, {"interactive:finished:": ended}, dead_letters)


def overview(
    *,
    server_view: ServerView | None = None,
    lanes: Sequence[LaneView] | None = None,
    daemons: Sequence[DaemonView] = (
        DaemonView("former-1", "former", "queue", "1"),
        DaemonView("0123abcd", "batch-worker", "queue", "2"),
    ),
    queue_view: QueueView | None = None,
) -> Overview:
    """A healthy system, but for what is given."""
    return Overview(
        server=server_view or server(),
        lanes=lanes_of([worker("mac-1", active=2), worker("mac-2")]) if lanes is None else lanes,
        daemons=daemons,
        queue=queue_view or queue(),
    )
