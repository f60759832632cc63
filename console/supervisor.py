"""Keeps child processes running: starts them in order, restarts what dies, gives up on what keeps dying, stops all.

Each child gets a pipe as standard input whose other end only this process holds. When that closes the parent is
gone, however it went, and the child ends: daemons by `end_with_parent`, other programs under `guard.py`.
Knows nothing of what the children do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

EXIT_CONFIG = 2
"""Exit status of a child whose settings are wrong: starting it again would not help."""
HURRY_S = 2.0
"""What a child gets to end in after the second SIGTERM."""


class SupervisorError(Exception):
    """A child cannot be kept running; the message says which, how it ended and what to do."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One child process."""

    name: str
    command: Sequence[str]
    environ: Mapping[str, str]
    stop_within_s: float = 15.0
    """How long it may take from SIGTERM to its end."""
    is_ready: Callable[[], bool] | None = None
    """Asked, in a thread, until it says yes; children behind this one start only then."""
    explain: Callable[[], str] | None = None
    """More about why it died, for the message."""
    is_optional: bool = False
    """Whether the others do their work without this child: however it dies, it is started again and ends nothing."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a dead child is started again."""

    first_delay_s: float = 0.5
    longest_delay_s: float = 15.0
    fast_death_s: float = 20.0
    """A child that lived shorter than this died fast."""
    fast_deaths_max: int = 8
    """More than the deaths a request that kills workers may cause before it is given up, twice over."""

    def delay_s(self, fast_deaths: int) -> float:
        """How long to wait before the next start, after so many fast deaths in a row."""
        return min(self.first_delay_s * 2.0 ** max(0, fast_deaths - 1), self.longest_delay_s)


@dataclass(slots=True)
class Child:
    """A child process through all its lives."""

    spec: ChildSpec
    policy: RestartPolicy
    clock: Callable[[], float]
    process: asyncio.subprocess.Process | None = None
    started_s: float = 0.0
    fast_deaths: int = 0
    starts: int = 0
    log: logging.Logger = field(default=logger)

    async def start(self) -> None:
        """Raises: SupervisorError."""
        try:
            # A session of its own, so that Ctrl-C reaches the supervisor alone, which stops children in order.
            self.process = await asyncio.create_subprocess_exec(
                *self.spec.command, stdin=subprocess.PIPE, env=dict(self.spec.environ), start_new_session=True
            )
        except OSError as error:
            raise SupervisorError(f"{self.spec.name} cannot be started: {error}") from error
        self.started_s = self.clock()
        self.starts += 1

    async def keep_running(self) -> None:
        """Start again after every death, until that is hopeless.

        Raises:
            SupervisorError: it died fast too often, or said that its settings are wrong; never for an optional child.
        """
        while True:
            assert self.process is not None
            status = await self.process.wait()
            # What it started itself must not run on beside its successor: two servers would share one data directory.
            self.kill()
            self.count_death(status)
            delay_s = self._delay_s(status)
            self.log.warning("%s ended with %s; starting it again in %.1f s", self.spec.name, _named(status), delay_s)
            await asyncio.sleep(delay_s)
            await self.start()

    async def become_ready(self) -> None:
        """Wait until the child says that it works.

        Raises:
            SupervisorError: it ended before that.
        """
        assert self.process is not None
        while self.spec.is_ready is not None and not await asyncio.to_thread(self.spec.is_ready):
            if self.process.returncode is not None:
                raise SupervisorError(self._obituary(self.process.returncode))
            await asyncio.sleep(0.02)

    async def stop(self, hurrying: asyncio.Event) -> None:
        """SIGTERM, a second one once there is a hurry, and SIGKILL to its process group if it does not end in time."""
        if self.process is None or self.process.returncode is not None:
            return
        self._terminate()
        ended, hurry = asyncio.create_task(self.process.wait()), asyncio.create_task(hurrying.wait())
        await asyncio.wait({ended, hurry}, timeout=self.spec.stop_within_s, return_when=asyncio.FIRST_COMPLETED)
        if hurrying.is_set() and not ended.done():
            self._terminate()
            await asyncio.wait({ended}, timeout=HURRY_S)
        if not ended.done():
            self.log.warning("%s did not stop in time; killing it", self.spec.name)
        hurry.cancel()
        self.kill()
        await ended

    def kill(self) -> None:
        """SIGKILL to whatever is left of the child and of what it started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def kill_if_running(self) -> None:
        # The process id of one that has ended may be another process's by now.
        if self.process is not None and self.process.returncode is None:
            self.kill()

    def count_death(self, status: int) -> None:
        """Note how it died.

        Raises:
            SupervisorError: starting it again is hopeless.
        """
        died_fast = self.clock() - self.started_s < self.policy.fast_death_s
        self.fast_deaths = self.fast_deaths + 1 if died_fast else 0
        if self.spec.is_optional:
            return
        if status == EXIT_CONFIG:
            raise SupervisorError(self._obituary(status))
        if self.fast_deaths >= self.policy.fast_deaths_max:
            raise SupervisorError(f"{self._obituary(status)} It died {self.fast_deaths} times in a row; giving up.")

    def _delay_s(self, status: int) -> float:
        # Wrong settings last until a person corrects them, perhaps on the server's side.
        return self.policy.longest_delay_s if status == EXIT_CONFIG else self.policy.delay_s(self.fast_deaths)

    def _terminate(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def _obituary(self, status: int) -> str:
        more = self.spec.explain() if self.spec.explain else ""
        return f"{self.spec.name} ended with {_named(status)}." + (f"\n{more}\n" if more else "")


class Supervisor:
    """Runs children from the first start to the last stop."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        policy: RestartPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.children = [Child(spec, policy or RestartPolicy(), clock) for spec in specs]
        self._stopping = asyncio.Event()
        self._hurrying = asyncio.Event()

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """Ask for the end; asking again hurries, asking a third time kills."""
        if self._hurrying.is_set():
            for child in self.children:
                child.kill_if_running()
        if self._stopping.is_set():
            self._hurrying.set()
        self._stopping.set()

    async def run(self, while_running: Callable[[], Awaitable[None]] | None = None) -> None:
        """Start all children in order, keep them running until `stop`, end them in reverse order.

        Args:
            while_running: runs beside the children once all are started, and is cancelled with them.

        Raises:
            SupervisorError: a child cannot be kept running; the others are stopped first.
        """
        stopping = asyncio.create_task(self._stopping.wait())
        running = asyncio.create_task(self._run_children(while_running))
        try:
            await asyncio.wait({stopping, running}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (stopping, running):
                task.cancel()
            await asyncio.gather(stopping, running, return_exceptions=True)
            for child in reversed(self.children):
                await child.stop(self._hurrying)
        if not running.cancelled() and (error := running.exception()):
            raise error

    async def _run_children(self, while_running: Callable[[], Awaitable[None]] | None) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for child in self.children:
                    await child.start()
                    await child.become_ready()
                    group.create_task(child.keep_running())
                if while_running is not None:
                    group.create_task(_awaited(while_running))
        except BaseExceptionGroup as group:
            failures = group.subgroup(SupervisorError)
            if failures is None:
                raise
            raise failures.exceptions[0] from None


def stop_on_signals(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    """Have Ctrl-C, SIGTERM and a closed terminal call `stop`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)


def end_with_parent(*, hurry_s: float = 1.0, grace_s: float = 5.0, parent: int = 0) -> None:
    """End this process when the pipe at descriptor `parent` closes: SIGTERM, again after `hurry_s`, then SIGKILL.

    A daemon that is told twice hands back at once what it holds, so that those requests go on after the next start.
    """
    arguments = (parent, hurry_s, grace_s)
    threading.Thread(target=_wait_for_parent, args=arguments, name="parent", daemon=True).start()


def _wait_for_parent(parent: int, hurry_s: float, grace_s: float) -> None:
    while os.read(parent, 64):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(hurry_s)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os.kill(os.getpid(), signal.SIGKILL)


def mtplx_command(*words: str) -> list[str]:
    """The command that runs one of our own commands as a child."""
    # -P: the directory we are started in may hold an `api/` or `console/settings.py` of its own.
    return [sys.executable, "-P", "-m", "mtplx", *words]


async def _awaited(function: Callable[[], Awaitable[None]]) -> None:
    await function()


def _named(status: int) -> str:
    return f"status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
