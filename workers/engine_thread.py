"""The one thread on which a model is loaded, stepped and closed; it knows nothing of asyncio but how to wake it.

Commands go in by a queue, deliveries come out by the `deliver` callable, which must be safe to call from here. The
thread waits in that queue alone: while nothing is active, and while too many steps are not acknowledged. An engine
without rows may have work for such a time, which it does piece by piece.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from mtplx_core.engine import Engine, Row, StepResult
from mtplx_core.errors import RowRejectedError

logger = logging.getLogger(__name__)

IDLE_PAUSE_S = 0.05
"""Between two pieces of work of an engine without rows."""


class Stepped(NamedTuple):
    """A step returned."""

    result: StepResult


class Rejected(NamedTuple):
    """The engine would not take a row."""

    row_id: str
    message: str


class FunctionAnswer(NamedTuple):
    """A function ran on the thread."""

    ticket: int
    value: Any
    error: Exception | None


class Died(NamedTuple):
    """The thread has ended because of this error; nothing more comes."""

    error: Exception


Delivery = Stepped | Rejected | FunctionAnswer | Died


class EngineThread:
    """Runs an engine. Every method may be called from any one other thread; none of them waits but `join`."""

    def __init__(
        self, deliver: Callable[[Delivery], None], *, run_ahead_steps: int, farewell: Callable[[], None]
    ) -> None:
        """`farewell` is the last that runs on the thread."""
        self._deliver = deliver
        self._farewell = farewell
        self._run_ahead_steps = run_ahead_steps
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._engine: Engine | None = None
        self._unacknowledged = 0
        self._is_closing = False
        self._may_idle = False
        """Whether the engine may have work for a time without rows."""
        # A daemon thread: a step that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, ticket: int, function: Callable[[], Any]) -> None:
        """Run a function between steps; `FunctionAnswer` follows."""
        self._commands.put(partial(self._call, ticket, function))

    def use(self, ticket: int, build: Callable[[], Engine]) -> None:
        """Build the engine and step it from then on; `FunctionAnswer` carries it, to be asked for constants only."""
        self._commands.put(partial(self._call, ticket, partial(self._use, build)))

    def snapshot(self, ticket: int) -> None:
        """Read the engine's counters between steps; `FunctionAnswer` follows."""
        self._commands.put(partial(self._call, ticket, self._snapshot))

    def admit(self, row: Row) -> None:
        self._commands.put(partial(self._admit, row))

    def discard(self, row_id: str) -> None:
        self._commands.put(partial(self._discard, row_id))

    def pause(self, row_id: str) -> None:
        self._commands.put(partial(self._pause, row_id))

    def resume(self, row_id: str) -> None:
        self._commands.put(partial(self._resume, row_id))

    def acknowledge(self, steps: int) -> None:
        """Say that so many steps are committed, so that as many more may be taken."""
        self._commands.put(partial(self._acknowledge, steps))

    def close(self) -> None:
        """End after the step that runs now."""
        self._commands.put(self._close)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; False when it did not come."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def _can_step(self) -> bool:
        if self._engine is None or not self._engine.active_rows or self._is_closing:
            return False
        return self._unacknowledged < self._run_ahead_steps

    def _main(self) -> None:
        try:
            while not self._is_closing:
                for obey in self._due_commands():
                    obey()
                if self._can_step:
                    self._step()
        except Exception as error:
            logger.exception("the engine thread has died")
            self._tell(Died(error))
        finally:
            self._engine = None
            self._farewell()

    def _due_commands(self) -> Iterator[Callable[[], None]]:
        """Everything queued; waits for the first command when there is nothing else to do."""
        if not self._can_step:
            yield self._next_command()
        while not self._is_closing:
            try:
                yield self._commands.get_nowait()
            except Empty:
                return

    def _next_command(self) -> Callable[[], None]:
        """Wait for a command; an engine without rows works meanwhile, and is asked between two pieces of that."""
        while self._may_idle and self._engine is not None and not self._engine.active_rows:
            try:
                return self._commands.get(timeout=IDLE_PAUSE_S)
            except Empty:
                self._may_idle = self._engine.idle()
        return self._commands.get()

    def _step(self) -> None:
        assert self._engine is not None
        result = self._engine.step()
        self._may_idle = True
        self._unacknowledged += 1
        self._tell(Stepped(result))

    def _call(self, ticket: int, function: Callable[[], Any]) -> None:
        try:
            self._tell(FunctionAnswer(ticket, function(), None))
        except Exception as error:  # belongs to whoever asked, who gets it raised
            self._tell(FunctionAnswer(ticket, None, error))

    def _use(self, build: Callable[[], Engine]) -> Engine:
        self._engine = build()
        self._may_idle = True
        return self._engine

    def _snapshot(self) -> dict[str, Any]:
        return {} if self._engine is None else dict(self._engine.snapshot())

    def _admit(self, row: Row) -> None:
        assert self._engine is not None
        try:
            self._engine.admit(row)
        except RowRejectedError as error:
            self._tell(Rejected(row.row_id, str(error)))

    def _discard(self, row_id: str) -> None:
        if self._engine is not None:
            self._engine.discard(row_id)

    def _pause(self, row_id: str) -> None:
        if self._engine is not None:
            self._engine.pause(row_id)

    def _resume(self, row_id: str) -> None:
        if self._engine is None:
            return
        try:
            self._engine.resume(row_id)
        except RowRejectedError as error:
            self._tell(Rejected(row_id, str(error)))

    def _acknowledge(self, steps: int) -> None:
        self._unacknowledged -= steps

    def _close(self) -> None:
        self._is_closing = True
        if self._engine is not None:
            self._engine.close()

    def _tell(self, delivery: Delivery) -> None:
        try:
            self._deliver(delivery)
        except RuntimeError:
            # The event loop is closed: nobody is left to work for.
            self._is_closing = True
