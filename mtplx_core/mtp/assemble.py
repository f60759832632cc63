"""Puts an MTP lane together: trunk, head, start-up probe, depth policy, engine. Decodes nothing itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx

from mtplx_core.caches.attention import fused_positions
from mtplx_core.engine import USUAL_DEPTH, Engine, Geometry, Profile
from mtplx_core.engines.serial import SerialEngine
from mtplx_core.errors import ModelLoadError
from mtplx_core.heads.attached import load_attached_head, shipped_head
from mtplx_core.heads.base import Head
from mtplx_core.heads.native import load_native_head
from mtplx_core.heads.usefulness import require_useful_head
from mtplx_core.models.loader import LoadedModel, has_experts, weight_bytes
from mtplx_core.models.memory import hold_buffer_cache, plan_this_machine
from mtplx_core.models.trunk import Trunk
from mtplx_core.mtp.cost_table import assumed_costs, assumed_draft_shares
from mtplx_core.mtp.depth import AdaptiveDepth, FixedDepth
from mtplx_core.mtp.engine import MtpBatchEngine, MtpOptions
from mtplx_core.mtp.idle_work import IdleWork, no_idle_work
from mtplx_core.mtp.probe import Probe, Steps, load_or_probe, probe_anew
from mtplx_core.mtp.probe_file import probe_file, write_probe

logger = logging.getLogger(__name__)

SHIPPED = Path(__file__).resolve().parents[1] / "shipped_heads"
B1_EXACT_LANE = "mtp_batch_b1_exact_serial"


def build_mtp_engine(
    loaded: LoadedModel,
    geometry: Geometry,
    *,
    profile: Profile = Profile.BALANCED,
    head: Head | None = None,
    probe_dir: Path | None = None,
    overlaps: bool | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Engine:
    """The engine of an MTP lane.

    Args:
        head: drafts where prompt lookup finds nothing.
        overlaps: whether a cycle is built while another runs; None: on a GPU.
        probe_dir: where this machine's measurements are kept; None starts from assumed costs and learns from there.

    Raises:
        UnsupportedModeError: the ragged cache cannot carry this model.
    """
    if profile is Profile.B1_EXACT:
        return SerialEngine(loaded, replace(geometry, depth=0), lane=B1_EXACT_LANE, replays_committed=True)
    hold_buffer_cache(plan_this_machine(weight_bytes=weight_bytes(loaded)))
    trunk, measured = Trunk(loaded.model), 0
    costs = assumed_costs(rows=geometry.decode_batch_max, depth=geometry.depth)
    shares = None if head is None else assumed_draft_shares()
    chunk_tokens, idle_work = geometry.prefill_chunk_tokens, no_idle_work()
    if probe_dir is not None:
        probe = load_or_probe(trunk, geometry, identity=loaded.identity, folder=probe_dir, clock=clock, head=head)
        costs, shares = probe.cost_table(geometry), None if head is None else probe.share_table(head)
        chunk_tokens = probe.chunk_tokens
        measured = max(depth for _, depth in probe.seconds)

        def keep(anew: Probe) -> None:
            """The prefill chunk is the next start's: a lane cuts all prompts alike as long as it lives."""
            write_probe(probe_file(probe_dir, loaded.identity, geometry), anew)
            costs.measured_anew(anew.costs(geometry))

        measuring = _Measuring(probe, partial(probe_anew, trunk, geometry, head=head, clock=clock), keep)
        idle_work = IdleWork(measuring.steps, is_due=measuring.is_due, clock=clock)
    most = deepest(geometry.depth, measured, has_experts=has_experts(loaded.config))
    head_depth_max = None if head is None else head.max_depth
    policy = AdaptiveDepth(most, costs, shares, head_depth_max) if most else FixedDepth(0)
    options = MtpOptions(policy=policy, chunk_tokens=chunk_tokens, overlaps=overlaps, clock=clock, idle_work=idle_work)
    return MtpBatchEngine(loaded, geometry, head=head, options=options)


class _Measuring:
    """Replaces a probe that was cut short, made on a busy machine or is old, while the lane has no rows."""

    def __init__(self, probe: Probe, anew: Callable[[Probe], Steps[Probe]], keep: Callable[[Probe], None]) -> None:
        self._probe = probe
        self._anew = anew
        self._keep = keep
        self._is_first = True

    def is_due(self) -> bool:
        """A machine that is always busy is not measured again and again."""
        return self._probe.is_old(time.time()) or self._is_first and self._probe.is_doubtful

    def steps(self) -> Steps[None]:
        self._probe = yield from self._anew(self._probe)
        self._is_first = False
        self._keep(self._probe)
        logger.info("measured anew what forwards cost here, as the lane was idle")


def usual_depth(trunk: Trunk) -> int:
    """The most tokens drafted per cycle where nobody says.

    On a GPU a verify step stays within what MLX's fused attention for few queries takes.
    """
    if mx.default_device() != mx.Device(mx.gpu):
        return USUAL_DEPTH
    return max(1, min(USUAL_DEPTH, fused_positions(trunk.query_heads // trunk.key_heads) - 1))


def deepest(depth: int, measured: int, *, has_experts: bool) -> int:
    """The most tokens drafted per cycle.

    The positions of a verify step share few experts, so in a mixture each costs nearly as much as the first, which
    assumed costs know nothing of: there it is one, unless deeper cycles were measured.
    """
    return min(depth, max(measured, 1)) if has_experts else depth


def find_head(folder: Path | None, loaded: LoadedModel) -> Head | None:
    """The head in `folder`, or else the one the model brings along, or else one that comes with this package.

    None where there is none of them.

    Raises:
        ModelLoadError: the head is not one this model can use, or below the floor of acceptance.
    """
    if folder is not None:
        return load_head(folder, loaded)
    found = load_native_head(loaded, Trunk(loaded.model))
    if found is None:
        return _shipped_head(loaded)
    logger.info(
        "the model's own head agrees with it on %.0f %% of a built-in text (norms: %s)",
        100 * found.agreement,
        found.convention,
    )
    return found.head


def load_head(folder: Path, loaded: LoadedModel) -> Head:
    """An attached head for this model that is worth running.

    Raises:
        ModelLoadError: unreadable, trained for another model, or below the floor of acceptance.
    """
    trunk = Trunk(loaded.model)
    head = load_attached_head(folder, trunk)
    agreement = require_useful_head(trunk, head)
    logger.info("head %s agrees with the model on %.0f %% of a built-in text", head.name, 100 * agreement)
    return head


def _shipped_head(loaded: LoadedModel) -> Head | None:
    """A finetune may look like the model a shipped head is for; it then runs without one."""
    folder = shipped_head(SHIPPED, Trunk(loaded.model))
    if folder is None:
        return None
    try:
        return load_head(folder, loaded)
    except ModelLoadError as error:
        logger.warning("%s drafts from its rows' own text only: %s", loaded.name, error)
        return None
