"""Who has fallen silent, as the API itself sees it, on a clock that is a number. Engine: none (the queue is a fake)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry

from api.fleet.backend import Fleet
from api.fleet.catalog import SILENT_S, Catalog
from api.fleet.fleet_metrics import FleetCollector
from api.fleet.health import Health, take_health
from broker.errors import BrokerUnavailableError
from broker.registry import DaemonRecord
from tests.api.conftest import wait_until
from tests.api.fake import IDENTITY, FakeBackend, fleet, former, worker

LANE = f"{IDENTITY}:balanced:ar_batch_b8"
STEP_S = SILENT_S / 6


class Counting(FakeBackend):
    """Knows how often it was looked at."""

    looks = 0

    async def fleet(self) -> Fleet:
        self.looks += 1
        return await super().fleet()


class Onlooker:
    """A catalog, and what it says of the daemons it is shown."""

    def __init__(self) -> None:
        self.backend = FakeBackend()
        self.now_s = 0.0
        self.catalog = Catalog(self.backend, age_s=0, lane_grace_s=60, stall_s=120, clock=lambda: self.now_s)

    async def look(self, *daemons: DaemonRecord, after_s: float = STEP_S) -> Health:
        """One look, some time after the last."""
        self.now_s += after_s
        self.backend.picture = fleet(daemons=daemons)
        health = await take_health(self.catalog, is_draining=False, is_connected=True, open_requests=0)
        await self.catalog.close()  # what it takes by itself is tried below
        return health

    async def look_in_vain(self, *, after_s: float = STEP_S) -> Health:
        """The same while Redis is away."""
        self.backend.fleet_error = BrokerUnavailableError("away")
        health = await self.look(after_s=after_s)
        self.backend.fleet_error = None
        return health


@pytest.fixture
def onlooker() -> Onlooker:
    return Onlooker()


def words(healths: Sequence[Health]) -> list[str]:
    return [health.status for health in healths]


async def test_health_is_stalled_where_no_former_was_heard_of_for_long(onlooker: Onlooker) -> None:
    healths = [await onlooker.look(worker(beat=i)) for i in range(8)]

    assert words(healths) == ["healthy"] * 6 + ["stalled"] * 2
    assert healths[-1].http_status == 503
    assert "no former" in healths[-1].reason


async def test_health_is_stalled_where_the_record_of_a_former_is_all_there_is_of_it(onlooker: Onlooker) -> None:
    healths = [await onlooker.look(worker(beat=i), former(7)) for i in range(8)]

    assert words(healths) == ["healthy"] * 6 + ["stalled"] * 2
    assert healths[-1].formers == []


async def test_health_is_well_again_when_a_former_beats(onlooker: Onlooker) -> None:
    for i in range(8):
        await onlooker.look(worker(beat=i), former(7))

    health = await onlooker.look(worker(beat=8), former(8))

    assert health.status == "healthy"
    assert [each.id for each in health.formers] == ["former-1"]


async def test_former_that_stands_by_counts(onlooker: Onlooker) -> None:
    healths = [await onlooker.look(worker(beat=i), former(i, working="0")) for i in range(20)]

    assert set(words(healths)) == {"healthy"}


async def test_health_does_not_flap_while_one_former_hands_over_to_the_next(onlooker: Onlooker) -> None:
    healths = [await onlooker.look(worker(beat=i), former(i)) for i in range(9)]
    healths += [await onlooker.look(worker(beat=i)) for i in range(9, 13)]
    healths += [await onlooker.look(worker(beat=i), former(0, name="former-2")) for i in range(13, 15)]
    healths += [await onlooker.look(worker(beat=i), former(i, name="former-2")) for i in range(15, 25)]

    assert set(words(healths)) == {"healthy"}


async def test_worker_that_fell_silent_is_neither_shown_nor_counted(onlooker: Onlooker) -> None:
    healths = [await onlooker.look(worker(beat=3), former(i)) for i in range(8)]

    assert words(healths) == ["healthy"] * 6 + ["stalled"] * 2
    assert "no worker" in healths[-1].reason
    assert healths[-1].lanes == []
    assert gauges(onlooker.catalog.last) == {"mtplx_workers": None, "mtplx_rows": None, "mtplx_rows_free": None}


async def test_worker_that_beats_is_counted_beside_one_that_fell_silent(onlooker: Onlooker) -> None:
    for i in range(8):
        health = await onlooker.look(worker(beat=3), worker(beat=i, name="worker-2"), former(i))

    assert health.status == "healthy"
    assert [each.id for each in health.lanes[0].workers] == ["worker-2"]
    assert gauges(onlooker.catalog.last) == {"mtplx_workers": 1, "mtplx_rows": 8, "mtplx_rows_free": 8}


async def test_worker_that_loads_beside_a_silent_one_is_waited_for(onlooker: Onlooker) -> None:
    for i in range(8):
        loading = worker(beat=i, name="worker-2", phase="starting", is_accepting=False)
        health = await onlooker.look(worker(beat=3), loading, former(i))

    assert health.status == "starting"


async def test_nobody_is_silent_before_another_while_has_passed_since_redis_was_away(onlooker: Onlooker) -> None:
    for _ in range(5):
        await onlooker.look(worker(beat=3), former(3))
    away = [await onlooker.look_in_vain() for _ in range(5)]

    healths = [await onlooker.look(worker(beat=3), former(3)) for _ in range(8)]

    assert {health.reason for health in away} == {"away"}
    assert words(healths) == ["healthy"] * 6 + ["stalled"] * 2


async def test_short_outage_starts_the_watch_anew(onlooker: Onlooker) -> None:
    for _ in range(6):
        await onlooker.look(worker(beat=3), former(3))
    await onlooker.look_in_vain()

    assert (await onlooker.look(worker(beat=3), former(3))).status == "healthy"


async def test_subscription_that_broke_starts_the_watch_anew(onlooker: Onlooker) -> None:
    for _ in range(6):
        await onlooker.look(worker(beat=3), former(3))
    onlooker.backend.is_connected = False
    await onlooker.look()
    onlooker.backend.is_connected = True

    assert (await onlooker.look(worker(beat=3), former(3))).status == "healthy"


async def test_nobody_is_silent_because_the_api_itself_stood_still(onlooker: Onlooker) -> None:
    for _ in range(3):
        await onlooker.look(worker(beat=3), former(3))

    health = await onlooker.look(worker(beat=3), former(3), after_s=3600)

    assert health.status == "healthy"


async def test_former_that_fell_silent_foresees_no_waits(onlooker: Onlooker) -> None:
    snapshot = f'{{"waits_ms": {{"{IDENTITY}:balanced": {{"interactive": 6400}}}}}}'
    waits = []

    for i in range(8):
        await onlooker.look(worker(beat=i), former(7, snapshot=snapshot))
        waits.append(onlooker.catalog.wait_s(await onlooker.catalog.route(IDENTITY, None), "interactive"))

    assert waits == [6.4] * 6 + [None] * 2


async def test_silence_is_seen_though_nobody_asks() -> None:
    backend, silent_s = Counting(), 0.06
    # Its time is made of pictures: how long they take on this machine does not matter.
    catalog = Catalog(
        backend, age_s=0, lane_grace_s=60, stall_s=120, silent_s=silent_s, clock=lambda: backend.looks * silent_s / 6
    )

    catalog.look_on()
    await wait_until(lambda: not catalog.last.has_former)
    await catalog.close()

    assert catalog.last.silent == {"worker-1"}


def gauges(picture: Fleet) -> dict[str, float | None]:
    """What is counted of the lane; None where it has no sample."""
    registry = CollectorRegistry()
    registry.register(FleetCollector(lambda: picture))
    return {
        "mtplx_workers": registry.get_sample_value("mtplx_workers", {"lane": LANE, "phase": "serving"}),
        "mtplx_rows": registry.get_sample_value("mtplx_rows", {"lane": LANE}),
        "mtplx_rows_free": registry.get_sample_value("mtplx_rows_free", {"lane": LANE}),
    }
