"""The overview and how a person sees it. Made-up records, and the fake Redis; runs on no engine."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from broker.connection.connect import without_password
from console.commands.status import Rates, Speed, render
from console.overview import lanes_of
from tests.console.overviews import LANE, overview, queue, server, worker


def shown(**changes: object) -> str:
    return text_of(render(overview(**changes)))  # type: ignore[arg-type]  # keyword arguments of `overview`


def text_of(rendered: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(rendered)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_overview_counts_the_rows_of_a_lane_over_its_workers() -> None:
    (lane,) = lanes_of([worker("mac-1", active=2), worker("mac-2", active=3)])

    assert (lane.rows, lane.rows_active, [each.id for each in lane.workers]) == (16, 5, ["mac-1", "mac-2"])


def test_overview_keeps_workers_of_different_lanes_apart() -> None:
    other = type(LANE)("other@99", "balanced", "llama_serial_b1_t1", "serial", 1, 2048)

    assert [lane.model for lane in lanes_of([worker("a"), worker("b", lane=other)])] == ["other@99", "smol@1234"]


def test_overview_is_plain_json() -> None:
    assert json.loads(json.dumps(overview().as_json()))["lanes"][0]["rows_active"] == 2


@pytest.mark.parametrize(
    ("url", "safe"),
    [
        ("redis://:secret@host:6379/0", "redis://:***@host:6379/0"),
        ("rediss://user:secret@host", "rediss://user:***@host"),
        ("unix://:secret@/run/broker.sock", "unix://:***@/run/broker.sock"),
        ("redis://host:6379", "redis://host:6379"),
        ("unix:///a:b@c/broker.sock", "unix:///a:b@c/broker.sock"),
        ("redis://host?password=secret&db=1", "redis://host?password=***&db=1"),
        ("redis://:secret@[::1", "redis://:***@[::1"),
    ],
)
def test_overview_hides_the_password_of_a_url(url: str, safe: str) -> None:
    assert without_password(url) == safe


def test_status_shows_every_worker_with_its_rows() -> None:
    text = shown()

    assert all(word in text for word in ("mac-1", "mac-2", "mac-1.local", "2/8", "0/8", LANE.fingerprint))


def test_status_shows_queue_and_dead_letters() -> None:
    text = shown(queue_view=queue(ended=11, dead_letters=2))

    assert all(word in text for word in ("5 live", "3 interactive", "11 ended", "2 dead letters"))


def test_status_names_the_persistence_policy() -> None:
    config = {"appendonly": "yes", "appendfsync": "everysec"}

    assert "persistence everysec" in shown(server_view=server(config=config))


def test_status_says_so_when_nothing_decodes() -> None:
    assert "no workers" in shown(lanes=[])


def test_status_marks_a_worker_that_takes_no_more() -> None:
    assert "not accepting" in shown(lanes=lanes_of([worker("mac-1", is_accepting=False)]))


def test_top_counts_what_happened_between_two_looks() -> None:
    times = iter([10.0, 12.0])
    rates = Rates(clock=lambda: next(times))

    first = rates.look(overview(queue_view=queue(ended=100), lanes=lanes_of([worker("a", tokens=50)])))
    second = rates.look(overview(queue_view=queue(ended=130), lanes=lanes_of([worker("a", tokens=70), worker("b")])))

    assert first is None
    assert second == Speed(ended_per_s=15.0, tokens_per_s={"a": 10.0})


def test_top_shows_the_speed_of_a_worker() -> None:
    view = overview(lanes=lanes_of([worker("a", tokens=70)]))

    assert "123" in text_of(render(view, speed=Speed(1.0, {"a": 123.4})))


def test_status_survives_a_snapshot_it_cannot_read() -> None:
    record = worker("a")
    (lane,) = lanes_of([replace(record, fields={**record.fields, "snapshot": "{broken"})])

    assert (lane.workers[0].tokens_committed, lane.workers[0].snapshot) == (0, {})
