"""Counters of this API process, in Prometheus' text format; the fleet's gauges beside them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from api.fleet.backend import Fleet
from api.fleet.fleet_metrics import FleetCollector
from broker.batches import BatchRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)

_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics", "/"})
"""Paths with a count of their own; whatever else clients ask for is counted together."""

Clock = Callable[[], float]


class Metrics:
    """One per process; nothing global, so that two apps in one process do not share counts."""

    def __init__(self, fleet: Callable[[], Fleet], *, clock: Clock = time.monotonic) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # untyped there; drops samples nobody reads
        self.registry = CollectorRegistry()
        self._clock = clock
        self._open = 0
        registry = self.registry
        self.responses = Counter(
            "mtplx_http_responses", "HTTP answers by path and status.", ["path", "status"], registry=registry
        )
        self.accepted = Counter(
            "mtplx_requests_accepted", "Requests of the queue accepted for a client.", ["endpoint"], registry=registry
        )
        self.ended = Counter(
            "mtplx_requests_ended", "Accepted requests by how they ended.", ["endpoint", "end"], registry=registry
        )
        self.open = Gauge("mtplx_requests_open", "Accepted requests not yet ended.", ["endpoint"], registry=registry)
        self.prompt_tokens = Counter("mtplx_prompt_tokens", "Tokens of accepted prompts.", registry=registry)
        self.completion_tokens = Counter("mtplx_completion_tokens", "Completion tokens received.", registry=registry)
        self.first_token = Histogram(
            "mtplx_first_token_seconds", "Acceptance to first token.", buckets=_SECONDS, registry=registry
        )
        self.between_tokens = Histogram(
            "mtplx_between_tokens_seconds",
            "Time between two arrivals of tokens, by the tokens that arrived.",
            buckets=_GAPS,
            registry=registry,
        )
        self.batches = Gauge("mtplx_batches", "Batches that have not ended.", ["status"], registry=registry)
        self.batch_lines = Gauge("mtplx_batch_lines", "Lines of these batches.", ["state"], registry=registry)
        registry.register(FleetCollector(fleet))

    @property
    def open_requests(self) -> int:
        """Accepted requests of this process that have not ended."""
        return self._open

    def show_batches(self, records: Sequence[BatchRecord]) -> None:
        """The open batches of the whole system, as they were last read."""
        self.batches.clear()
        for record in records:
            self.batches.labels(record.status).inc()
        answered, failed = (sum(getattr(record, name) for record in records) for name in ("completed", "failed"))
        self.batch_lines.labels("answered").set(answered)
        self.batch_lines.labels("failed").set(failed)
        self.batch_lines.labels("left").set(sum(record.total for record in records) - answered - failed)

    def answered(self, path: str, status: int) -> None:
        """One HTTP answer was begun."""
        self.responses.labels(path if path in _PATHS else "other", str(status)).inc()

    def call(self, endpoint: str, *, requests: int, prompt_tokens: int) -> CallMeter:
        """A call whose requests were accepted."""
        self.prompt_tokens.inc(prompt_tokens)
        self.accepted.labels(endpoint).inc(requests)
        self.open.labels(endpoint).inc(requests)
        self._open += requests
        return CallMeter(self, endpoint, self._clock)

    def closed(self, endpoint: str) -> None:
        self._open -= 1
        self.open.labels(endpoint).dec()

    def render(self) -> bytes:
        return generate_latest(self.registry)


class CallMeter:
    """Counts one call; each of its requests ends once."""

    def __init__(self, metrics: Metrics, endpoint: str, clock: Clock) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._clock = clock
        self._began = clock()
        self._last_by_choice: dict[int, float] = {}

    def tokens(self, index: int, count: int) -> None:
        """Tokens of one choice have arrived."""
        now, last = self._clock(), self._last_by_choice.get(index)
        self._last_by_choice[index] = now
        self._metrics.completion_tokens.inc(count)
        if last is None:
            self._metrics.first_token.observe(now - self._began)
        elif count:
            self._metrics.between_tokens.observe((now - last) / count)

    def ended(self, how: str) -> None:
        """One request has ended: stop, length, deadline, cancelled, failed or left."""
        self._metrics.ended.labels(self._endpoint, how).inc()
        self._metrics.closed(self._endpoint)
