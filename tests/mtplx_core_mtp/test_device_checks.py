"""The device checks say what they found on a device where all is well. Runs on a tiny random llama."""

from __future__ import annotations

import itertools
from pathlib import Path

from mtplx_core.device_checks import Effort, run_device_checks
from mtplx_core.engine import Geometry
from tests.support.models import tiny_llama

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
