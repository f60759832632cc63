"""The MTP lane's engine: rows of different lengths, decoded together in cycles of draft, verify and commit.

On a GPU one cycle is in flight while the host builds the next, so stops, joins and leaving take effect a cycle late
and what was computed for a row that had ended is thrown away. Where the host is the device, building beside it only
slows it down, so a step starts a cycle and reads it. Owns the order of things on the host; what happens on the
device is `device_batch`'s.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mtplx_core.engine import Geometry, Row, RowCycle, RowEnd, RowTokens, StepResult
from mtplx_core.engines.lane_guard import inside_mtp_lane
from mtplx_core.engines.roster import check_place, check_row, row_end, with_end_tokens
from mtplx_core.errors import EngineDeadError
from mtplx_core.heads.base import Head
from mtplx_core.models.loader import LoadedModel
from mtplx_core.models.trunk import Trunk
from mtplx_core.mtp.depth import AcceptanceRates, CycleOutcome, DepthPolicy, assumed_policy
from mtplx_core.mtp.device_batch import CyclePlan, DeviceBatch, Started
from mtplx_core.mtp.idle_work import IdleWork, no_idle_work
from mtplx_core.mtp.parked_rows import ParkedRows
from mtplx_core.mtp.pending_cycle import PendingCycle, SlotOutcome
from mtplx_core.mtp.prefill_batch import PrefillBatcher, PrefillRound
from mtplx_core.mtp.slots import Slot, Slots
from mtplx_core.mtp.telemetry import Telemetry
from mtplx_core.sampling.logprobs import row_logprobs

logger = logging.getLogger(__name__)

TIMED_EVERY = 256
"""Cycles between two that are evaluated stage by stage."""
_CLEAR_EVERY = 512
"""Cycles between two clearings of MLX's buffer cache."""
_MOST_CHUNKS = 4
"""Fed between two cycles while somebody waits for the next token, however many wait for their first."""
_UNTRIED_HEAD = AcceptanceRates(head_right=0.8, head_instead=0.8)
"""What is expected of a head that has not drafted: much, so that it is tried and soon known."""
NOT_FINITE = "the model produced numbers that are not finite"


@dataclass(frozen=True, slots=True)
class MtpOptions:
    """How the engine runs, beyond its geometry."""

    policy: DepthPolicy | None = None
    """None: adaptive up to the geometry's depth, from an assumed cost table."""
    chunk_tokens: int | None = None
    """Prompt tokens fed between two cycles; None: the geometry's."""
    keeps_width: bool = False
    """Leave holes where rows left, so that the rows that stay see the same number of physical rows."""
    overlaps: bool | None = None
    """Whether the next cycle is built while one runs; None: on a GPU."""
    clock: Callable[[], float] = time.perf_counter
    idle_work: IdleWork = field(default_factory=no_idle_work)
    """What is done while there are no rows."""


class MtpBatchEngine:
    """See `Engine`. Decodes up to `decode_batch_max` rows at once and drafts up to `depth` tokens per row and cycle.

    Args:
        loaded: the model; every layer of it must keep a plain key-value cache or a gated delta net's state.
        geometry: the lane's bounds.
        head: drafts where prompt lookup finds nothing.
        options: depth policy, prefill chunk, clock.

    Raises:
        UnsupportedModeError: the ragged cache cannot carry this model.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        geometry: Geometry,
        *,
        head: Head | None = None,
        options: MtpOptions | None = None,
    ) -> None:
        self._loaded = loaded
        self._geometry = geometry
        self._options = options or MtpOptions()
        self._trunk = Trunk(loaded.model)
        self._head = head
        self._device = DeviceBatch(self._trunk, geometry, head, overlaps=self._options.overlaps)
        head_depth_max = None if self._device.head is None else self._device.head.max_depth
        self._policy = self._options.policy or assumed_policy(
            rows=geometry.decode_batch_max, depth=geometry.depth, head_depth_max=head_depth_max
        )
        chunk_tokens = self._options.chunk_tokens or geometry.prefill_chunk_tokens
        self._feeder = PrefillBatcher(
            self._trunk, self._device.head, chunk_tokens=chunk_tokens, ends=loaded.eos_token_ids
        )
        self._seats = Slots()
        self._sidelines = ParkedRows()
        self._already_ended: list[RowEnd] = []
        self._flight: PendingCycle | None = None
        self._telemetry = Telemetry()
        self._lane_odds = _UNTRIED_HEAD.copy() if self._device.head is not None else AcceptanceRates()
        self._was_interrupted = True
        """Whether something other than a cycle was given to the device since the last cycle."""
        self._last_read_s = 0.0
        self._is_dead = False

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @property
    def active_rows(self) -> int:
        return self._places_taken + self._sidelines.under_way

    @property
    def trunk(self) -> Trunk:
        return self._trunk

    def row_bytes(self, tokens: int) -> int:
        return self._device.row_bytes(tokens)

    def admit(self, row: Row) -> None:
        vocab_size, active = self._trunk.vocab_size, self._active_ids()
        paused = self._sidelines.paused
        check_row(row, geometry=self._geometry, vocab_size=vocab_size, active=active, paused=paused)
        if reason := row_end(row, row.committed, eos_token_ids=self._loaded.eos_token_ids):
            self._already_ended.append(RowEnd(row.row_id, reason))
            return
        self._options.idle_work.interrupt()
        row = with_end_tokens(row, eos_token_ids=self._loaded.eos_token_ids)
        self._sidelines.line_up(self._feeder.prefill_of(row))

    def discard(self, row_id: str) -> None:
        seat, ended = self._seats.find(row_id), len(self._already_ended)
        if seat is not None:
            self._seats.remove(seat)
        self._already_ended = [end for end in self._already_ended if end.row_id != row_id]
        was_here = self._sidelines.discard(row_id) or seat is not None or len(self._already_ended) < ended
        self._telemetry.left["discarded"] += was_here
        self._free_if_empty()

    def pause(self, row_id: str) -> None:
        if (seat := self._seats.find(row_id)) is not None:
            self._sidelines.take_out(seat, self._device.lift(self._seats.vacate(seat), longest=seat.longest))
            self._was_interrupted = True
        else:
            self._sidelines.pause(row_id)
        self._free_if_empty()

    def resume(self, row_id: str) -> None:
        if row_id in self._sidelines.paused:
            check_place(self._places_taken, geometry=self._geometry)
            self._sidelines.resume(row_id)

    def step(self) -> StepResult:
        if self._is_dead:
            raise EngineDeadError("an earlier step failed")
        try:
            with inside_mtp_lane():
                return self._step()
        except Exception as error:
            self._is_dead = True
            raise EngineDeadError(f"a decoding step failed: {error}") from error

    def idle(self) -> bool:
        return not self.active_rows and not self._sidelines.paused and self._options.idle_work.step()

    def snapshot(self) -> Mapping[str, Any]:
        return {
            "mode": "mtp_batch",
            "lane": f"mtp_batch_width_{self._geometry.decode_batch_max}",
            "active_rows": self.active_rows,
            "prefill_rows": len(self._sidelines.waiting),
            "paused_rows": len(self._sidelines.paused),
            "physical_rows": self._seats.width,
            "depth_max": self._geometry.depth,
            "head": self._device.head.name if self._device.head is not None else None,
            "kv_bytes": self._device.kv_bytes + self._sidelines.lifted_bytes,
            **self._telemetry.snapshot(),
        }

    def close(self) -> None:
        self._sidelines.clear()
        self._feeder.clear()
        self._already_ended.clear()
        for _, seat in list(self._seats):
            self._seats.remove(seat)
        self._free_if_empty()

    def _step(self) -> StepResult:
        ended, self._already_ended = self._already_ended, []
        before, tokens, ends = self._flight, list[RowTokens](), list[RowEnd]()
        self._seat_returning()
        self._close_holes()
        fed = self._feed_prefill()
        self._seat_prefilled()
        self._flight = self._start_cycle(follows=before is not None or not self._device.overlaps)
        if not self._device.overlaps:
            before, self._flight = self._flight, None
        if before is not None:
            tokens, ends = self._collect(before)
        self._free_if_empty()
        self._telemetry.left.update(end.reason for end in (*ended, *fed.ends, *ends))
        return StepResult(tuple(tokens), (*ended, *fed.ends, *ends), tuple(fed.progress))

    def _active_ids(self) -> list[str]:
        seated = [seat.row.row_id for _, seat in self._seats]
        return [*seated, *self._sidelines.ids, *(end.row_id for end in self._already_ended)]

    @property
    def _places_taken(self) -> int:
        return self._seats.taken + self._sidelines.places + len(self._already_ended)

    def _close_holes(self) -> None:
        """A waiting row is about to take a hole, so then it stays."""
        if self._options.keeps_width and self._seats.taken:
            return
        are_wanted = self._seats.taken and self._sidelines.are_coming
        if self._seats.width == self._seats.taken or are_wanted:
            return
        moves = self._seats.close_holes()
        self._device.close_holes(moves, width=self._seats.width)
        self._was_interrupted = True

    def _feed_prefill(self) -> PrefillRound:
        """The prompts' next chunks, as many as fit between two cycles."""
        waiting = self._sidelines.waiting
        fed = self._feeder.feed(list(waiting), most=self._prefill_budget()) if waiting else PrefillRound()
        self._was_interrupted |= bool(fed.tokens)
        self._telemetry.prefill_tokens += fed.tokens
        self._telemetry.shared_tokens += fed.shared
        for end in fed.ends:
            self._sidelines.discard(end.row_id)
        return fed

    def _prefill_budget(self) -> int:
        """Tokens fed between two cycles: a chunk, or one for each row that waits per row that is held up meanwhile."""
        held_up = sum(not seat.row.is_offline for _, seat in self._seats)
        if not held_up:
            return self._geometry.prefill_chunk_tokens
        waiting = sum(not prefill.row.is_offline for prefill in self._sidelines.waiting)
        return self._feeder.chunk_tokens * min(max(waiting // held_up, 1), _MOST_CHUNKS)

    def _seat_returning(self) -> None:
        for seat, lifted in self._sidelines.take_returning():
            slot = self._seats.free_slot()
            self._device.put(slot, lifted)
            self._seats.put(slot, seat)
            self._was_interrupted = True

    def _seat_prefilled(self) -> None:
        for prefill in self._sidelines.take_prefilled():
            slot = self._seats.free_slot()
            self._device.seat(slot, prefill)
            self._seats.put(slot, Slot(prefill.row, list(prefill.row.committed), odds=self._lane_odds.copy()))
            self._telemetry.joined += 1
            self._was_interrupted = True

    def _start_cycle(self, *, follows: bool) -> PendingCycle | None:
        running = [(slot, seat) for slot, seat in self._seats if not seat.is_finishing]
        if not running:
            return None
        begun_s = self._options.clock()
        guesses = None if self._device.overlaps else self._guesses(running)
        found = None if guesses is None else [slot in guesses for slot, _ in running]
        fresh = sum(not seat.tokens and not seat.row.is_offline for _, seat in running)
        odds = [seat.odds for _, seat in running]
        width, keys = self._seats.width, self._attended_keys(running)
        drafting = self._policy.choose(odds, found, width=width, keys=keys, is_first=2 * fresh >= len(running))
        depth, slots = drafting.depth, range(width)
        by_lookup = frozenset(slot for (slot, _), is_so in zip(running, drafting.by_lookup, strict=True) if is_so)
        lengths = {slot: seat.longest + depth + 1 for slot, seat in running}
        asked = [seat.row.top_logprobs for _, seat in running if seat.row.top_logprobs is not None]
        plan = CyclePlan(
            depth=depth,
            lengths=tuple(lengths.get(slot, 0) for slot in slots),
            parked=frozenset(slots) - lengths.keys(),
            by_lookup=by_lookup,
            guesses=guesses,
            head_depth=0 if self._device.head is None else drafting.head_depth,
            top_logprobs=max(asked, default=None),
            is_timed=self._telemetry.cycles % TIMED_EVERY == TIMED_EVERY - 1,
        )
        follows = follows and not self._was_interrupted and not plan.is_timed
        started = self._start_timed(plan) if plan.is_timed else self._device.start(plan)
        self._was_interrupted = plan.is_timed
        for _, seat in running:
            seat.in_flight.append(depth + 1)
        return PendingCycle(running, plan, started, follows, begun_s, keys)

    def _attended_keys(self, running: Sequence[tuple[int, Slot]]) -> int:
        """Keys that a cycle goes over: a GPU's kernel goes over as many for each slot as for the longest row."""
        lengths = [seat.longest + 1 for _, seat in running]
        return self._seats.width * max(lengths) if self._device.overlaps else sum(lengths)

    def _guesses(self, running: Sequence[tuple[int, Slot]]) -> dict[int, tuple[int, ...]]:
        """What lookup finds, by slot, as many tokens as any cycle drafts."""
        wanted = max(self._geometry.depth, 1)
        guesses = {slot: seat.recall().guess(wanted) for slot, seat in running}
        return {slot: guess for slot, guess in guesses.items() if guess is not None}

    def _start_timed(self, plan: CyclePlan) -> Started:
        """One cycle stage by stage, with a barrier behind each, to see where the time goes."""
        clock = self._options.clock
        if self._flight is not None:
            mx.eval(self._flight.started.chosen)
        times = [clock()]
        started = self._device.start(plan)
        times.append(clock())
        for stage in started.stages:
            mx.eval(stage)
            times.append(clock())
        names = ("build", "draft", "verify", "sample")
        self._telemetry.stage_s = dict(zip(names, _differences(times), strict=True))
        return started

    def _collect(self, flight: PendingCycle) -> tuple[list[RowTokens], list[RowEnd]]:
        asked_s, plan = self._options.clock(), flight.plan
        outcomes = flight.read()
        self._time(flight, asked_s=asked_s, read_s=self._options.clock())
        if not self._device.overlaps:
            self._settle(flight, outcomes)
        tokens: list[RowTokens] = []
        ends: list[RowEnd] = []
        trials: list[CycleOutcome] = []
        for slot, seat in flight.seats:
            seat.in_flight.pop(0)
            if seat.has_left:
                continue
            outcome = outcomes[slot]
            if not outcome.is_finite:
                ends.append(self._leave(seat, "error", NOT_FINITE))
                continue
            is_by_lookup = outcome.has_lookup and slot in plan.by_lookup
            drafted = plan.depth if is_by_lookup else plan.head_depth
            accepted = min(outcome.accepted, drafted)
            trials.append(CycleOutcome(drafted, accepted, outcome.has_lookup, outcome.is_lookup_right, is_by_lookup))
            self._learn(seat, trials[-1])
            fresh = outcome.chosen[: outcome.accepted + 1]
            tokens.append(self._commit(seat, flight, slot, fresh, drafted=drafted))
            if reason := row_end(seat.row, seat.tokens, eos_token_ids=self._loaded.eos_token_ids):
                ends.append(self._leave(seat, reason))
        self._telemetry.count_cycle(plan.depth, trials, has_head=self._device.head is not None)
        if self._telemetry.cycles % _CLEAR_EVERY == 0:
            mx.clear_cache()
        return tokens, ends

    def _settle(self, flight: PendingCycle, outcomes: Sequence[SlotOutcome]) -> None:
        running = {slot for slot, _ in flight.seats}
        taken = [outcome.accepted + 1 if slot in running else 0 for slot, outcome in enumerate(outcomes)]
        self._device.settle([outcome.chosen for outcome in outcomes], taken)

    def _commit(self, seat: Slot, flight: PendingCycle, slot: int, tokens: list[int], *, drafted: int) -> RowTokens:
        """Take what was accepted, up to the token that ends the row."""
        position = len(seat.tokens)
        for token in tokens:
            seat.tokens.append(token)
            if row_end(seat.row, seat.tokens, eos_token_ids=self._loaded.eos_token_ids):
                break
        fresh = tuple(seat.tokens[position:])
        self._telemetry.tokens += len(fresh)
        cycle = RowCycle(len(flight.seats), drafted, min(len(tokens) - 1, drafted, len(fresh)))
        arrays, logprobs = flight.started.logprobs, None
        if arrays is not None and seat.row.top_logprobs is not None:
            logprobs = row_logprobs(arrays, row=slot, count=len(fresh), top=seat.row.top_logprobs)
        return RowTokens(seat.row.row_id, position, fresh, logprobs, seat.count_cycle(cycle))

    def _learn(self, seat: Slot, trial: CycleOutcome) -> None:
        seat.odds.learn(trial)
        self._lane_odds.learn(trial)

    def _leave(self, seat: Slot, reason: str, message: str = "") -> RowEnd:
        if not self._sidelines.leave(seat.row.row_id):
            self._seats.remove(seat)
        return RowEnd(seat.row.row_id, reason, message, seat.stats)  # type: ignore[arg-type]

    def _time(self, flight: PendingCycle, *, asked_s: float, read_s: float) -> None:
        took_s = flight.took_s(asked_s, read_s, last_read_s=self._last_read_s if self._device.overlaps else None)
        self._last_read_s = read_s
        if took_s is not None:
            plan, width = flight.plan, len(flight.plan.lengths)
            self._telemetry.time_cycle(width, plan.depth, took_s)
            self._policy.see_cost(width, plan.depth, took_s, head_depth=plan.head_depth, keys=flight.keys)

    def _free_if_empty(self) -> None:
        if self.active_rows or not self._device.kv_bytes:
            return
        self._options.idle_work.interrupt()
        self._flight = None
        self._seats.close_holes()
        self._device.release()


def _differences(times: list[float]) -> list[float]:
    return [after - before for before, after in zip(times, times[1:], strict=False)]
