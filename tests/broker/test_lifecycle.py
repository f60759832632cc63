"""The life of requests as a state machine: whatever happens in whatever order, the books balance.

Engine: none, tokens are a function of id and position; Redis: fakeredis in process.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from broker import keys
from broker.former.daemon import Former, FormerConfig
from broker.former.policy import PolicyConfig
from broker.scripts import DEFAULT_BOUNDS, Refusal, RowCommit, RowFinish, Scripts
from broker.wire import TERMINAL, Assignment, Cause, Finished, pack_tokens
from harness import factories as make
from harness.reads import read_counts, read_log, read_state, read_waiting
from harness.redis_servers import InProcessServer

T = TypeVar("T")

WORKERS = ("w1", "w2")
IDS = tuple(f"r{i}" for i in range(6))
ROWS, SLOTS, MAX_CRASHES = 2, 45, 3
STREAMS = (keys.WAIT_INTERACTIVE, keys.WAIT_OFFLINE, keys.WAIT_RETURNED)

workers = st.sampled_from(WORKERS)
ids = st.sampled_from(IDS)


def token(request_id: str, position: int) -> int:
    return int(request_id[1:]) * 1000 + position


class Lifecycle(RuleBasedStateMachine):
    """Requests, two workers and a former; every write a worker can make, also late and twice."""

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self.client = self.run(self._open())
        self.scripts = Scripts(self.client)
        config = FormerConfig("unused", policy=PolicyConfig(rows_per_key=2))
        self.former = Former(config, commands=self.client, blocking=self.client)
        self.accepted: set[str] = set()
        self.seats: set[tuple[str, Assignment]] = set()
        """Every seat a worker ever had: those it has still, and those from which it may write too late."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)

    async def _open(self) -> Any:
        return InProcessServer().client()

    def teardown(self) -> None:
        self.run(self.client.aclose())
        self._runner.close()

    @initialize()
    def register_both(self) -> None:
        for worker_id in WORKERS:
            self.register(worker_id)

    @rule(worker_id=workers)
    def register(self, worker_id: str) -> None:
        lane = make.lane(decode_batch_max=ROWS)
        self.run(self.scripts.register(make.registration(worker_id, lane=lane, free_tokens=SLOTS)))

    @rule(request_id=ids, is_offline=st.booleans(), key_id=st.sampled_from(["", "a"]))
    def accept(self, request_id: str, is_offline: bool, key_id: str) -> None:
        if request_id in self.accepted:
            return
        ticket = make.ticket(request_id, priority="offline" if is_offline else "interactive", key_id=key_id)
        submission = make.submission(request_id, ticket=ticket)
        assert self.run(self.scripts.accept(submission, DEFAULT_BOUNDS)).is_new
        assert not self.run(self.scripts.accept(submission, DEFAULT_BOUNDS)).is_new
        self.accepted.add(request_id)

    @rule()
    def form(self) -> None:
        self.run(self.former.form())
        for worker_id in WORKERS:
            rows = self.run(read_counts(self.client, keys.rows(worker_id)))
            self.seats |= {(worker_id, Assignment(name, attempt)) for name, attempt in rows.items()}

    @rule(data=st.data(), count=st.integers(0, 3), back=st.integers(0, 2))
    def commit(self, data: st.DataObject, count: int, back: int) -> None:
        """Tokens from the end of the log on, or from a little before it, by a seat of now or of long ago."""
        found = self.pick_seat(data)
        if found is None:
            return
        worker_id, seat = found
        length = len(self.run(read_log(self.client, seat.request_id)))
        start = max(0, length - back)
        packed = pack_tokens(token(seat.request_id, position) for position in range(start, length + count))
        result = self.run(self.scripts.commit(worker_id, [RowCommit(seat, start, packed)], {}))
        if not self.is_owner(worker_id, seat):
            assert result.refused == (Refusal(seat.request_id, "lost", 0),)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        found = self.pick_seat(data)
        if found is None:
            return
        worker_id, seat = found
        was_owner = self.is_owner(worker_id, seat)
        event = Finished(seat.request_id, "stop", len(self.run(read_log(self.client, seat.request_id))))
        row = RowFinish(seat, -1, "finished", "stop", event)
        outcomes = [self.run(self.scripts.finish(worker_id, row)).outcome for _ in range(2)]
        assert outcomes == ["ok", "again"] if was_owner else outcomes[0] in ("lost", "again")

    @rule(data=st.data())
    def hand_back(self, data: st.DataObject) -> None:
        found = self.pick_seat(data)
        if found is None:
            return
        worker_id, seat = found
        was_owner = self.is_owner(worker_id, seat)
        outcomes = [self.run(self.scripts.hand_back(worker_id, [seat], is_crash=False)) for _ in range(2)]
        assert (outcomes[0][seat.request_id] == "lost") != was_owner
        assert outcomes[1][seat.request_id] == "lost"

    @rule(worker_id=workers)
    def crash(self, worker_id: str) -> None:
        while seats := self.run(self.scripts.retire(worker_id)):
            self.run(self.scripts.hand_back(worker_id, seats, is_crash=True, max_crashes=MAX_CRASHES))

    @rule(request_id=ids, cause=st.sampled_from(["client", "deadline", "stop"]))
    def cancel(self, request_id: str, cause: Cause) -> None:
        outcome = self.run(self.scripts.cancel(request_id, cause))
        assert (outcome == "unknown") == (request_id not in self.accepted)

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        places: Counter[str] = Counter()
        for stream in STREAMS:
            places.update(self.run(read_waiting(self.client, stream)))
        for worker_id in WORKERS:
            places.update(self.run(read_counts(self.client, keys.rows(worker_id))).keys())
        places.update(self.with_status(*TERMINAL))
        assert places == Counter(self.accepted)

    @invariant()
    def every_log_is_a_beginning_of_the_right_tokens(self) -> None:
        for request_id in self.accepted:
            log = self.run(read_log(self.client, request_id))
            assert log == tuple(token(request_id, position) for position in range(len(log)))

    @invariant()
    def free_rows_and_slots_are_what_no_row_holds(self) -> None:
        for worker_id in WORKERS:
            record = self.run(cast("Any", self.client.hmget(keys.daemon(worker_id), "free", "free_tokens")))
            if record[0] is not None:
                held = len(self.run(read_counts(self.client, keys.rows(worker_id))))
                assert [int(each) for each in record] == [ROWS - held, SLOTS - 19 * held]

    @invariant()
    def load_counts_what_has_not_ended(self) -> None:
        load = self.run(read_counts(self.client, keys.LOAD))
        alive = len(self.with_status("waiting", "running"))
        assert sum(count for name, count in load.items() if name.startswith("requests:")) == alive
        assert sum(count for name, count in load.items() if name.startswith("tokens:")) == 19 * alive

    @invariant()
    def ends_are_counted_once(self) -> None:
        assert sum(self.run(read_counts(self.client, keys.ENDED)).values()) == len(self.with_status(*TERMINAL))

    @invariant()
    def rows_of_keys_count_what_runs(self) -> None:
        assert sum(self.run(read_counts(self.client, keys.KEY_ROWS)).values()) == len(self.with_status("running"))

    def with_status(self, *statuses: str) -> list[str]:
        states = {request_id: self.run(read_state(self.client, request_id)) for request_id in self.accepted}
        return [request_id for request_id, state in states.items() if state["status"].decode() in statuses]

    def pick_seat(self, data: st.DataObject) -> tuple[str, Assignment] | None:
        return data.draw(st.sampled_from(sorted(self.seats))) if self.seats else None

    def is_owner(self, worker_id: str, seat: Assignment) -> bool:
        state = self.run(read_state(self.client, seat.request_id))
        owner = (state["status"], state.get("owner"), int(state["attempt"]))
        return owner == (b"running", worker_id.encode(), seat.attempt)


Lifecycle.TestCase.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
test_requests_live_by_the_rules_whatever_happens = Lifecycle.TestCase
