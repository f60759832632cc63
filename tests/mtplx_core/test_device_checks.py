"""The device checks say what they found on a device where all is well. Runs on a tiny random llama."""

from __future__ import annotations

import itertools
from pathlib import Path

from harness.models import tiny_llama
from mtplx_core.device_checks import Effort, check_peak_memory, run_device_checks
from mtplx_core.engine import Geometry, StepResult
from mtplx_core.mtp.engine import MtpBatchEngine

GEOMETRY = Geometry(decode_batch_max=3, max_context_tokens=256, depth=1, prefill_chunk_tokens=64)


def test_all_eight_checks_pass_and_save_the_forward_times(tmp_path: Path) -> None:
    ticks = itertools.count(0.0, 0.05)
    slept: list[float] = []

    checks = list(
        run_device_checks(
            tiny_llama(),
            GEOMETRY,
            probe_dir=tmp_path,
            effort=Effort(memory_cycles=16, flat_cycles=40, idle_s=3.0, churn_s=1.0),
            clock=lambda: next(ticks),
            sleep=slept.append,
        )
    )

    assert len(checks) == 8
    assert [check for check in checks if not check.passed] == []
    assert all(check.figures for check in checks)
    assert slept == [3.0]
    assert len(list(tmp_path.iterdir())) == 1


class Copying(MtpBatchEngine):
    """Holds on to its caches during a step, so that none can be written in place."""

    def step(self) -> StepResult:
        held = list(self._device._cache.arrays)
        result = super().step()
        held.clear()
        return result


def test_copy_of_the_whole_cache_in_a_cycle_is_caught() -> None:
    loaded = tiny_llama()

    assert check_peak_memory(loaded, GEOMETRY, cycles=16).passed
    assert not check_peak_memory(loaded, GEOMETRY, cycles=16, kind=Copying).passed
