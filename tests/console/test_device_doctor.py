"""What `mtplx doctor --device` measures. The checks are left out; the model is a tiny random llama."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from console.commands.device import run_device_doctor
from console.daemons import worker_config
from console.settings import Settings
from harness.models import write_tiny_llama
from mtplx_core import device_checks
from workers.mlx_lane import MlxLane


def test_device_doctor_measures_the_lane_that_a_worker_would_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Any] = []

    def note(_: object, geometry: object, *, probe_dir: Path) -> Iterator[object]:
        checked.append((geometry, probe_dir))
        return iter(())

    monkeypatch.setattr(device_checks, "run_device_checks", note)
    settings = Settings(
        redis="redis://unused",
        model=str(write_tiny_llama(tmp_path / "model")),
        cache_dir=tmp_path,
        scheduler_mode="mtp_batch",
        decode_batch_max=3,
        prefill_chunk_tokens=64,
    )

    assert run_device_doctor(settings, {}, as_json=True) == 0
    lane = MlxLane(worker_config(settings, {}))
    lane.describe()

    assert checked == [(lane.build().geometry, tmp_path / "probes")]
