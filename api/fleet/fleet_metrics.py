"""Gauges of the fleet for `/metrics`: rows and workers by lane, the queue, and what daemons count themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from api.fleet.backend import Fleet
from api.fleet.health import snapshot_of
from broker.registry import DaemonRecord


class FleetCollector:
    """The fleet as the registry said last; read at scrape time."""

    def __init__(self, fleet: Callable[[], Fleet]) -> None:
        self._fleet = fleet

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        fleet = self._fleet()
        yield _workers(fleet)
        yield from _rows(fleet)
        yield from _queue(fleet)
        yield _ended(fleet)
        yield from _snapshots(fleet)


def _workers(fleet: Fleet) -> Metric:
    family = GaugeMetricFamily("mtplx_workers", "Live workers by lane and phase.", labels=["lane", "phase"])
    counts: dict[tuple[str, str], int] = {}
    for worker in fleet.beating_workers:
        assert worker.lane is not None
        key = (worker.lane.fingerprint, worker.fields.get("phase", "unknown"))
        counts[key] = counts.get(key, 0) + 1
    for labels, count in counts.items():
        family.add_metric(labels, count)
    return family


def _rows(fleet: Fleet) -> Iterator[Metric]:
    total = GaugeMetricFamily("mtplx_rows", "Rows of a lane's workers.", labels=["lane"])
    active = GaugeMetricFamily("mtplx_rows_active", "Rows running, by the workers' heartbeats.", labels=["lane"])
    free = GaugeMetricFamily("mtplx_rows_free", "Rows the former may still fill.", labels=["lane"])
    paused = GaugeMetricFamily("mtplx_rows_paused", "Offline rows that gave way and wait on a worker.", labels=["lane"])
    sums: dict[str, list[int]] = {}
    for worker in fleet.beating_workers:
        assert worker.lane is not None
        before = sums.get(worker.lane.fingerprint, [0, 0, 0, 0])
        now = (worker.lane.decode_batch_max, worker.active_rows, max(worker.free_rows, 0), worker.paused_rows)
        sums[worker.lane.fingerprint] = [old + new for old, new in zip(before, now, strict=True)]
    families = (total, active, free, paused)
    for lane, values in sums.items():
        for family, value in zip(families, values, strict=True):
            family.add_metric([lane], value)
    yield from families


def _queue(fleet: Fleet) -> Iterator[Metric]:
    requests = GaugeMetricFamily(
        "mtplx_queue_requests", "Requests accepted and not yet ended, running ones included.", labels=["priority"]
    )
    tokens = GaugeMetricFamily("mtplx_queue_tokens", "Their prompt tokens and token limits.", labels=["priority"])
    for priority in ("interactive", "offline"):
        requests.add_metric([priority], fleet.load.requests.get(priority, 0))
        tokens.add_metric([priority], fleet.load.tokens.get(priority, 0))
    yield from (requests, tokens)


def _ended(fleet: Fleet) -> Metric:
    family = CounterMetricFamily(
        "mtplx_fleet_requests_ended",
        "Requests ended, all API processes together.",
        labels=["priority", "status", "cause"],
    )
    for name, count in fleet.ended.items():
        parts = [*name.split(":", 2), "", ""][:3]
        family.add_metric(parts, count)
    return family


def _snapshots(fleet: Fleet) -> Iterator[Metric]:
    """Every number in a daemon's snapshot: `mtp_batch_cycles`, `ar_batch_steps`, `former_cohorts` and so on; what
    lies deeper, such as counts by depth, is told apart by `part`."""
    families: dict[str, GaugeMetricFamily] = {}
    for daemon in fleet.daemons:
        lane = daemon.lane.fingerprint if daemon.lane is not None else ""
        for name, part, value in _numbers(snapshot_of(daemon)):
            metric = f"{_prefix(daemon)}_{_NO_NAME.sub('_', name)}"
            if metric not in families:
                families[metric] = GaugeMetricFamily(
                    metric, "As the daemon's last heartbeat said.", labels=["lane", "daemon", "part"]
                )
            families[metric].add_metric([lane, daemon.id, part], value)
    yield from families.values()


_NO_NAME = re.compile(r"[^a-zA-Z0-9_]")


def _prefix(daemon: DaemonRecord) -> str:
    return _NO_NAME.sub("_", daemon.lane.mode if daemon.lane is not None else daemon.kind) or "daemon"


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    for name, value in values.items():
        for part, number in _leaves(value, ""):
            yield name, part, number


def _leaves(value: Any, path: str) -> Iterator[tuple[str, float]]:
    match value:
        case bool():
            yield path, float(value)
        case int() | float():
            yield path, value
        case list():
            for place, inner in enumerate(value, 1):
                yield from _leaves(inner, f"{path}/{place}" if path else str(place))
        case dict():
            for name, inner in value.items():
                yield from _leaves(inner, f"{path}/{name}" if path else str(name))
