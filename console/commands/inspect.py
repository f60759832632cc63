"""`mtplx inspect MODEL`: what a checkpoint is and what could run it, before anything does. Shows; finds out nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from mtplx_core.engine import USUAL_DEPTH

if TYPE_CHECKING:
    from mtplx_core.inspection import Inspection
    from mtplx_core.models.memory import MemoryPlan

_MIB = 1 << 20


@click.command()
@click.argument("model")
@click.option("--max-context-tokens", default=2048, show_default=True, help="Length of the row whose memory is told.")
@click.option("--depth", default=USUAL_DEPTH, show_default=True, help="Most tokens drafted per row and cycle.")
@click.option("--check", is_flag=True, help="Load the folder's weights and run the self-test of every mode.")
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def inspect(*, model: str, max_context_tokens: int, depth: int, check: bool, as_json: bool) -> None:
    """Say of a model, a folder or a hub id, which modes can run it, with which head, and what a row takes.

    Of a hub id only the configuration and the headers of its files are read.
    """
    from mtplx_core.blas import load_blas

    load_blas()  # before MLX

    from mtplx_core.inspection import inspect_model
    from mtplx_core.models.hub import HuggingFaceHub
    from mtplx_core.models.memory import plan_this_machine

    found = inspect_model(model, hub=HuggingFaceHub(), context_tokens=max_context_tokens, depth=depth, is_checked=check)
    plan = plan_this_machine(weight_bytes=found.weight_bytes + found.head.size_bytes)
    click.echo(json.dumps(_as_json(found, plan)) if as_json else "\n".join(_lines(found, plan)))


def _as_json(found: Inspection, plan: MemoryPlan) -> dict[str, Any]:
    return {**asdict(found), "memory_for_rows": plan.rows, "modes": [mode._asdict() for mode in found.modes]} | {
        "head": found.head._asdict()
    }


def _lines(found: Inspection, plan: MemoryPlan) -> list[str]:
    kind = "mixture of experts" if found.has_experts else "dense"
    lines = [
        f"model         {found.model}, {found.family}, {kind}",
        f"weights       {_mib(found.weight_bytes)}, quantised: {found.quantisation}",
        *_head_lines(found),
        f"memory        {_mib(plan.rows)} for rows on this machine; a row of {found.context_tokens} tokens takes:",
    ]
    for mode in found.modes:
        if mode.reason:
            lines.append(f"  {mode.mode:11s} cannot run it: {mode.reason}")
        else:
            lines.append(f"  {mode.mode:11s} {_mib(mode.row_bytes)}, {plan.rows // mode.row_bytes} rows fit")
    if not found.is_checked:
        lines.append("              a worker also runs each mode's self-test when it starts; --check runs it now")
    if found.has_experts:
        lines.append("depth         1 at most until this machine's probe measured more: positions share few experts")
    return lines


def _head_lines(found: Inspection) -> list[str]:
    head = found.head
    if not head.tensors:
        return [f"head          none: {head.reason}; mtp_batch drafts from the row's own text"]
    held = f"{head.tensors} tensors, {_mib(head.size_bytes)}, quantised: {head.quantisation}"
    if not head.is_usable:
        return [f"head          {held}", f"              not used: {head.reason}"]
    return [f"head          {held}", f"              norms: {head.norms}; the last word has its agreement at start"]


def _mib(size: int) -> str:
    return f"{size / _MIB:,.1f} MiB"
