"""The supervisor: order, restarts, giving up, and that no child outlives it. Tiny real processes; runs on no engine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from console.supervisor import EXIT_CONFIG, Child, ChildSpec, RestartPolicy, Supervisor, SupervisorError
from harness.stack import wait_until
from harness.wait import PATIENCE_S
from tests.console.processes import are_gone, children_of

ROOT = Path(__file__).resolve().parents[2]
ENVIRON = {"PATH": os.defpath, "PYTHONPATH": str(ROOT)}
IMPATIENT = RestartPolicy(first_delay_s=0.01, longest_delay_s=0.02, fast_deaths_max=3)

SLEEP = "import time; time.sleep(600)"
STUBBORN = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path({started!r}).touch()
time.sleep(600)
"""
NEEDS_TWO = """
import pathlib, signal, sys, time
def once(*_):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    pathlib.Path({started!r} + ".once").touch()
signal.signal(signal.SIGTERM, once)
pathlib.Path({started!r}).touch()
while True: time.sleep(600)
"""
WATCHES_PARENT = f"from console import supervisor; supervisor.end_with_parent(); {SLEEP}"
NOTES_END = """
import pathlib, signal, sys, time
def end(*_):
    with open({log!r}, "a") as file: file.write({name!r} + " ")
    sys.exit()
signal.signal(signal.SIGTERM, end)
pathlib.Path({log!r} + "." + {name!r}).touch()
time.sleep(600)
"""


def spec(
    code: str, name: str = "child", *, stop_within_s: float = 10.0, is_ready: Callable[[], bool] | None = None
) -> ChildSpec:
    return ChildSpec(name, [sys.executable, "-c", code], ENVIRON, stop_within_s=stop_within_s, is_ready=is_ready)


def noting(name: str, log: Path) -> ChildSpec:
    started = Path(f"{log}.{name}")
    return spec(NOTES_END.format(name=name, log=str(log)), name, is_ready=started.exists)


def stubborn(folder: Path, *, stop_within_s: float) -> ChildSpec:
    started = folder / "started"
    return spec(STUBBORN.format(started=str(started)), stop_within_s=stop_within_s, is_ready=started.exists)


def pid_of(child: Child) -> int:
    assert child.process is not None
    return child.process.pid


async def test_supervisor_stops_its_children_in_reverse_order(tmp_path: Path) -> None:
    log = tmp_path / "ends"
    supervisor = Supervisor([noting(name, log) for name in ("broker", "former", "api")])

    async def stop() -> None:
        supervisor.stop()

    await supervisor.run(stop)

    assert log.read_text().split() == ["api", "former", "broker"]


async def test_supervisor_starts_a_child_only_when_the_one_before_is_ready(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    supervisor = Supervisor([spec(SLEEP, is_ready=ready.exists), spec(SLEEP)])
    running = asyncio.create_task(supervisor.run())
    while supervisor.children[0].starts == 0:
        await asyncio.sleep(0)

    assert supervisor.children[1].starts == 0

    ready.touch()
    while supervisor.children[1].starts == 0:
        await asyncio.sleep(0.01)
    supervisor.stop()
    await running


async def test_supervisor_starts_a_child_again_when_it_is_killed() -> None:
    supervisor = Supervisor([spec(SLEEP)], policy=IMPATIENT)

    async def kill_and_wait() -> None:
        os.kill(pid_of(supervisor.children[0]), signal.SIGKILL)
        while supervisor.children[0].starts < 2:
            await asyncio.sleep(0.01)
        supervisor.stop()

    await supervisor.run(kill_and_wait)

    assert are_gone([pid_of(supervisor.children[0])])


@pytest.mark.parametrize("status", [1, EXIT_CONFIG])
async def test_supervisor_goes_on_without_an_optional_child_that_keeps_dying(status: int) -> None:
    optional = replace(spec(f"raise SystemExit({status})", "batch-worker"), is_optional=True)
    supervisor = Supervisor([optional, spec(SLEEP, "api")], policy=IMPATIENT)

    async def wait_for_many_deaths() -> None:
        while supervisor.children[0].starts < 3 * IMPATIENT.fast_deaths_max:
            await asyncio.sleep(0.01)
        supervisor.stop()

    await supervisor.run(wait_for_many_deaths)

    assert supervisor.children[1].starts == 1


async def test_supervisor_gives_up_on_a_child_that_keeps_dying() -> None:
    supervisor = Supervisor([spec(SLEEP, "broker"), spec("raise SystemExit(7)", "former")], policy=IMPATIENT)

    with pytest.raises(SupervisorError, match=r"former ended with status 7\. It died 3 times in a row; giving up"):
        await supervisor.run()

    assert supervisor.children[1].starts == IMPATIENT.fast_deaths_max
    assert are_gone([pid_of(supervisor.children[0])])


async def test_supervisor_never_restarts_a_child_whose_settings_are_wrong() -> None:
    supervisor = Supervisor([spec(f"raise SystemExit({EXIT_CONFIG})", "worker")], policy=IMPATIENT)

    with pytest.raises(SupervisorError, match="worker ended with status 2"):
        await supervisor.run()

    assert supervisor.children[0].starts == 1


async def test_supervisor_gives_up_on_a_child_that_ends_before_it_is_ready() -> None:
    supervisor = Supervisor([spec("raise SystemExit(1)", "broker", is_ready=lambda: False)])

    with pytest.raises(SupervisorError, match="broker ended with status 1"):
        await supervisor.run()


async def test_supervisor_says_which_program_is_missing() -> None:
    supervisor = Supervisor([ChildSpec("broker", ["/no/such/program"], ENVIRON)])

    with pytest.raises(SupervisorError, match="broker cannot be started"):
        await supervisor.run()


async def test_supervisor_kills_a_child_that_does_not_stop(tmp_path: Path) -> None:
    supervisor = Supervisor([stubborn(tmp_path, stop_within_s=0.1)])

    async def stop() -> None:
        supervisor.stop()

    await supervisor.run(stop)

    assert are_gone([pid_of(supervisor.children[0])])


async def test_supervisor_tells_a_child_again_when_it_is_asked_twice(tmp_path: Path) -> None:
    started = tmp_path / "started"
    child = spec(NEEDS_TWO.format(started=str(started)), stop_within_s=600, is_ready=started.exists)
    supervisor = Supervisor([child])

    async def stop() -> None:
        supervisor.stop()

    running = asyncio.create_task(supervisor.run(stop))
    while not (tmp_path / "started.once").exists():
        await asyncio.sleep(0.01)
    supervisor.stop()
    await asyncio.wait_for(running, PATIENCE_S)

    process = supervisor.children[0].process
    assert process is not None
    assert process.returncode == 0


async def test_supervisor_kills_at_once_when_it_is_asked_three_times(tmp_path: Path) -> None:
    supervisor = Supervisor([stubborn(tmp_path, stop_within_s=600)])

    async def stop_thrice() -> None:
        for _ in range(3):
            supervisor.stop()

    await asyncio.wait_for(supervisor.run(stop_thrice), PATIENCE_S)


def test_back_off_doubles_up_to_a_bound() -> None:
    policy = RestartPolicy(first_delay_s=1, longest_delay_s=5)

    assert [policy.delay_s(deaths) for deaths in range(5)] == [1, 1, 2, 4, 5]


async def test_child_that_lived_long_is_forgiven_its_fast_deaths() -> None:
    now_s = 0.0
    child = Child(spec("pass"), RestartPolicy(fast_death_s=10, fast_deaths_max=9), lambda: now_s)
    child.fast_deaths = 5
    now_s = 11.0

    child.count_death(1)

    assert child.fast_deaths == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_child_outlives_its_supervisor_however_that_ends(number: signal.Signals) -> None:
    code = """
import asyncio
from console.supervisor import ChildSpec, Supervisor, stop_on_signals
from tests.console.test_supervisor import WATCHES_PARENT, spec
supervisor = Supervisor([spec(WATCHES_PARENT), spec(WATCHES_PARENT)])
async def ready(): print("ready", flush=True)
async def main():
    stop_on_signals(asyncio.get_running_loop(), supervisor.stop)
    await supervisor.run(ready)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], env=ENVIRON, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    children = children_of(parent.pid)

    parent.send_signal(number)

    parent.wait(PATIENCE_S)
    parent.stdout.close()
    assert len(children) == 2
    wait_until(lambda: are_gone(children), "the children are gone")


def test_child_is_killed_when_it_does_not_end_with_its_parent(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = "from console import supervisor; supervisor.end_with_parent(hurry_s=0.1, grace_s=0.1)" + STUBBORN.format(
        started=str(started)
    )
    child = subprocess.Popen([sys.executable, "-c", code], env=ENVIRON, stdin=subprocess.PIPE)
    assert child.stdin is not None
    wait_until(started.exists, "the child has started")

    child.stdin.close()

    assert child.wait(PATIENCE_S) == -signal.SIGKILL
