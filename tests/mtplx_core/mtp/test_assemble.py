"""How an MTP lane is put together: b1-exact, unsupported caches, isolation, the start-up probe. Tiny random llama."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import mamba

from harness.models import MAMBA
from mtplx_core.build import build_engine
from mtplx_core.caches.attention import fused_positions
from mtplx_core.engine import Geometry, Profile, Row, SchedulerMode
from mtplx_core.engines.lane_guard import inside_mtp_lane, refuse_inside_mtp_lane
from mtplx_core.errors import LaneIsolationError, UnsupportedModeError
from mtplx_core.heads.attached import AttachedHead
from mtplx_core.models.loader import LoadedModel
from mtplx_core.models.trunk import Trunk
from mtplx_core.mtp.assemble import build_mtp_engine, usual_depth
from mtplx_core.mtp.depth import AcceptanceRates
from mtplx_core.mtp.engine import MtpBatchEngine
from mtplx_core.mtp.probe import Probe, draft_shares, load_or_probe, probe_forwards
from tests.mtplx_core.driving import run

GEOMETRY = Geometry(decode_batch_max=4, max_context_tokens=256, depth=1, prefill_chunk_tokens=64)


def generated(loaded: LoadedModel, row: Row) -> list[int]:
    model: Any = loaded.model
    return [int(token) for token, _ in generate_step(mx.array(row.prompt), model, max_tokens=row.max_tokens)]


def test_b1_exact_says_what_mlx_lm_says_among_neighbours_and_after_a_restart(loaded: LoadedModel) -> None:
    row = Row("row", tuple(range(30, 130)), 40, ignore_eos=True)
    neighbours = [Row("n0", (5, 6), 30), Row("n1", tuple(range(90)), 50, ignore_eos=True)]
    engine = build_engine(SchedulerMode.MTP_BATCH, loaded, geometry=GEOMETRY, profile=Profile.B1_EXACT)
    answer = generated(loaded, row)

    whole = run(engine, [neighbours[0], row, neighbours[1]]).tokens["row"]
    resumed = run(engine, [Row("row", row.prompt, 40, committed=tuple(answer[:17]), ignore_eos=True)]).tokens["row"]

    assert whole == answer
    assert answer[:17] + resumed == answer
    assert engine.snapshot()["lane"] == "mtp_batch_b1_exact_serial"


def test_model_with_other_caches_is_refused_with_the_reason() -> None:
    model: Any = mamba.Model(mamba.ModelArgs.from_dict(MAMBA))  # type: ignore[no-untyped-call]  # mlx-lm annotates in part

    with pytest.raises(UnsupportedModeError, match="ArraysCache.*use ar_batch"):
        Trunk(model)


def test_ar_service_cannot_be_called_from_the_mtp_lane() -> None:
    refuse_inside_mtp_lane("step")

    with inside_mtp_lane(), pytest.raises(LaneIsolationError, match="called step"):
        refuse_inside_mtp_lane("step")


def test_ar_engine_refuses_to_step_inside_the_mtp_lane(loaded: LoadedModel) -> None:
    engine = build_engine(SchedulerMode.AR_BATCH, loaded, geometry=GEOMETRY)

    with inside_mtp_lane(), pytest.raises(LaneIsolationError):
        engine.step()
    engine.close()


def ticking(seconds: float) -> Iterator[float]:
    return itertools.count(0.0, seconds)


def test_probe_covers_every_depth_at_one_row_and_at_all(loaded: LoadedModel) -> None:
    clock = ticking(0.001)

    probe = probe_forwards(Trunk(loaded.model), GEOMETRY, clock=lambda: next(clock))

    assert {(1, 0), (1, 1), (4, 0), (4, 1), (2, 0)} <= probe.seconds.keys()
    assert probe.chunk_tokens <= GEOMETRY.prefill_chunk_tokens
    assert probe.cost_table(GEOMETRY).cost(3, 1) > 0


def test_draft_is_measured_beside_a_plain_step(loaded: LoadedModel, head: AttachedHead) -> None:
    clock = ticking(0.25)

    shares = draft_shares(Trunk(loaded.model), head, plain_s={1: 0.25, 4: 0.5}, clock=lambda: next(clock))

    assert shares == {1: 1.0, 4: 0.5}


def test_drafts_of_another_head_are_measured_beside_what_is_kept(
    loaded: LoadedModel, head: AttachedHead, tmp_path: Path
) -> None:
    clock, trunk = ticking(0.001), Trunk(loaded.model)

    def probe(head: AttachedHead | None) -> Probe:
        return load_or_probe(trunk, GEOMETRY, identity="tiny@1", folder=tmp_path, clock=lambda: next(clock), head=head)

    without, with_head, again = probe(None), probe(head), probe(head)

    assert without.draft_shares == {}
    assert with_head.seconds == without.seconds
    assert with_head.draft_shares[head.name].keys() == {1, GEOMETRY.decode_batch_max}
    assert again == with_head
    assert with_head.share_table(head).cost(2, 0) > 0


def test_lane_with_a_head_is_probed_at_start_and_decodes(
    loaded: LoadedModel, head: AttachedHead, tmp_path: Path
) -> None:
    engine = build_mtp_engine(loaded, GEOMETRY, head=head, probe_dir=tmp_path)

    assert len(run(engine, [Row("row", (5, 6, 7), 8, ignore_eos=True)]).tokens["row"]) == 8
    assert list(tmp_path.iterdir())


def test_probe_of_a_deep_lane_leaves_out_depths_and_interpolates_them(loaded: LoadedModel) -> None:
    clock, deep = ticking(0.001), Geometry(decode_batch_max=4, max_context_tokens=256, depth=7, prefill_chunk_tokens=64)

    probe = probe_forwards(Trunk(loaded.model), deep, clock=lambda: next(clock))
    costs = Probe({(1, 0): 1.0, (1, 3): 1.3, (1, 5): 1.7, (1, 7): 2.1}, 64).cost_table(deep)

    assert {(rows, depth) for rows in (1, 2, 4) for depth in (0, 1, 2, 3, 5, 7)} == probe.seconds.keys()
    assert [costs.cost(1, depth) for depth in (4, 6)] == pytest.approx([1.5, 1.9])


@pytest.mark.parametrize(("queries_per_key", "positions"), [(1, 8), (4, 8), (5, 6), (8, 4), (16, 2), (32, 1), (64, 0)])
def test_lane_drafts_as_deep_as_fused_attention_takes_where_there_is_one(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, queries_per_key: int, positions: int
) -> None:
    trunk = Trunk(loaded.model)
    trunk.query_heads, trunk.key_heads = queries_per_key * 2, 2

    assert fused_positions(queries_per_key) == positions
    assert usual_depth(trunk) == 7

    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))

    assert usual_depth(trunk) == max(positions - 1, 1)


def test_probe_stops_when_its_time_is_up(loaded: LoadedModel) -> None:
    clock = ticking(1.0)

    probe = probe_forwards(Trunk(loaded.model), GEOMETRY, clock=lambda: next(clock), budget_s=5.0)

    assert len(probe.seconds) == 1
    assert probe.cost_table(GEOMETRY).cost(4, 1) > probe.cost_table(GEOMETRY).cost(4, 0)


def test_probe_is_kept_per_model_and_measured_once(loaded: LoadedModel, tmp_path: Path) -> None:
    clock, ticks = ticking(0.001), []

    def now() -> float:
        ticks.append(next(clock))
        return ticks[-1]

    trunk = Trunk(loaded.model)
    first = load_or_probe(trunk, GEOMETRY, identity="tiny@1", folder=tmp_path, clock=now)
    measured = len(ticks)
    again = load_or_probe(trunk, GEOMETRY, identity="tiny@1", folder=tmp_path, clock=now)

    assert again == first
    assert len(ticks) == measured > 0


def test_unreadable_probe_file_is_measured_anew(loaded: LoadedModel, tmp_path: Path) -> None:
    clock = ticking(0.001)
    trunk = Trunk(loaded.model)
    load_or_probe(trunk, GEOMETRY, identity="tiny@1", folder=tmp_path, clock=lambda: next(clock))
    (path,) = tmp_path.iterdir()
    path.write_text("{")

    assert load_or_probe(trunk, GEOMETRY, identity="tiny@1", folder=tmp_path, clock=lambda: next(clock)).seconds


@pytest.mark.parametrize("build", [MtpBatchEngine, build_mtp_engine], ids=["engine", "lane"])
def test_head_drafts_no_deeper_than_it_was_made_for_in_a_deeper_lane(
    loaded: LoadedModel, head: AttachedHead, build: Callable[..., Any]
) -> None:
    policy = build(loaded, replace(GEOMETRY, depth=7), head=head)._policy
    sure = AcceptanceRates(lookup_found=0.0, head_right=1.0, head_further=1.0)

    assert max(policy.choose([sure]).head_depth for _ in range(40)) == head.max_depth == 3
