"""The engine as asyncio sees it: submit rows, read a snapshot, shut down. Owns the engine thread.

What the engine says is handed to one listener, on the event loop. Counts steps, so that a step that never returns
can be told from a thread that has nothing to do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from mtplx_core.engine import Engine, Row, StepResult
from workers.engine_thread import Delivery, Died, EngineThread, FunctionAnswer, Rejected, Stepped
from workers.errors import EngineFailedError

logger = logging.getLogger(__name__)

T = TypeVar("T")

JOIN_S = 5.0


class Listener(Protocol):
    """Whoever is told what the engine does."""

    def on_step(self, result: StepResult) -> None: ...

    def on_reject(self, row_id: str, message: str) -> None: ...

    def on_death(self, error: Exception) -> None: ...


class Service:
    """Use from one event loop; `start` first."""

    def __init__(
        self,
        listener: Listener,
        *,
        run_ahead_steps: int,
        farewell: Callable[[], None] = lambda: None,
        join_s: float = JOIN_S,
    ) -> None:
        """`farewell` is the last that runs on the engine's thread."""
        self._listener = listener
        self._join_s = join_s
        self._run_ahead_steps = run_ahead_steps
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = EngineThread(self._deliver, run_ahead_steps=run_ahead_steps, farewell=farewell)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._tickets = 0
        self._unacknowledged = 0
        self._death: Exception | None = None
        self.steps = 0
        """Steps returned."""
        self._calls = 0

    @property
    def progress(self) -> int:
        """Steps returned and functions run; grows as long as the thread gets on."""
        return self.steps + self._calls

    @property
    def is_waiting(self) -> bool:
        """Whether the thread holds still because too many steps are not committed."""
        return self._unacknowledged >= self._run_ahead_steps

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread, between steps."""
        ticket, answer = self._expect()
        self._thread.call(ticket, function)
        result: T = await answer
        return result

    async def use(self, build: Callable[[], Engine]) -> Engine:
        """Build an engine on its thread. Ask the returned one for constants (geometry, row_bytes) only."""
        ticket, answer = self._expect()
        self._thread.use(ticket, build)
        engine: Engine = await answer
        return engine

    async def snapshot(self) -> Mapping[str, Any]:
        """The engine's counters; comes when the step that runs now has returned."""
        ticket, answer = self._expect()
        self._thread.snapshot(ticket)
        counters: Mapping[str, Any] = await answer
        return counters

    def submit(self, row: Row) -> None:
        """Admit a row at the next step boundary; a refusal comes as `on_reject`."""
        self._thread.admit(row)

    def discard(self, row_id: str) -> None:
        """Drop a row at the next step boundary; what was decoded of it until then still comes."""
        self._thread.discard(row_id)

    def pause(self, row_id: str) -> None:
        """Take a row out of the batch at the next step boundary; what was under way of it still comes."""
        self._thread.pause(row_id)

    def resume(self, row_id: str) -> None:
        """Let a paused row go on from the next step boundary."""
        self._thread.resume(row_id)

    def acknowledge(self, steps: int) -> None:
        """So many steps are committed."""
        if steps:
            self._unacknowledged -= steps
            self._thread.acknowledge(steps)

    async def shutdown(self) -> bool:
        """End the thread; False when it is stuck in a step."""
        self._thread.close()
        return await asyncio.to_thread(self._thread.join, self._join_s)

    def _expect(self) -> tuple[int, asyncio.Future[Any]]:
        if self._death is not None:
            raise EngineFailedError(f"the engine has died: {self._death}") from self._death
        assert self._loop is not None, "start() comes first"
        self._tickets += 1
        answer = self._loop.create_future()
        self._answers[self._tickets] = answer
        return self._tickets, answer

    def _deliver(self, delivery: Delivery) -> None:
        """Called on the engine's thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._handle, delivery)

    def _handle(self, delivery: Delivery) -> None:
        match delivery:
            case Stepped(result):
                self.steps += 1
                self._unacknowledged += 1
                self._listener.on_step(result)
            case Rejected(row_id, message):
                self._listener.on_reject(row_id, message)
            case FunctionAnswer():
                self._calls += 1
                self._answer(delivery)
            case Died(error):
                self._die(error)

    def _answer(self, answered: FunctionAnswer) -> None:
        future = self._answers.pop(answered.ticket)
        if future.done():  # whoever asked has left
            return
        if answered.error is not None:
            future.set_exception(answered.error)
        else:
            future.set_result(answered.value)

    def _die(self, error: Exception) -> None:
        self._death = error
        for future in self._answers.values():
            if not future.done():
                future.set_exception(EngineFailedError(f"the engine has died: {error}"))
        self._answers.clear()
        self._listener.on_death(error)
