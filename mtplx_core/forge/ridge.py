"""Where training starts: the best linear map from (embedding, hidden state) to the next hidden state, in closed form.

A head so set up drafts by that map alone from the first step on; its layer has yet to learn to add anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mtplx_core.forge.lessons import batch_lessons, collate
from mtplx_core.forge.states import Lesson
from mtplx_core.heads.attached import AttachedHead
from mtplx_core.models.trunk import Trunk

_POSITIONS = 2048
_PENALTY = 20.0


def start_head(trunk: Trunk, draft_ids: list[int], lessons: Sequence[Lesson], *, max_depth: int) -> AttachedHead:
    """A head that drafts by the ridge map, its layer the trunk's last one with silent outputs, ready to be trained."""
    head = AttachedHead(trunk, draft_ids, max_depth=max_depth)
    head.fc.weight = ridge_map(trunk, lessons)
    _take_over(head.layer, trunk.layers[-1])
    mx.eval(head.parameters())
    return head


def ridge_map(trunk: Trunk, lessons: Sequence[Lesson]) -> mx.array:
    """(hidden, 2 * hidden) float32"""
    size = trunk.hidden_size
    gram, moment = np.zeros((2 * size, 2 * size)), np.zeros((2 * size, size))
    scale = 1 / trunk.final_norm_weight.astype(mx.float32)
    for group in batch_lessons(lessons, positions=_POSITIONS):
        batch = collate(group)
        embedded = trunk.embed(batch.tokens).astype(mx.float32)
        pair = mx.concatenate([_unit(embedded), _unit(batch.hidden[:, :-1])], axis=-1)
        inputs = np.array(pair, np.float64)[np.array(batch.is_pair)]
        # Before the final norm's gain: the head's own norm starts with that gain.
        targets = np.array(batch.hidden[:, 1:] * scale, np.float64)[np.array(batch.is_pair)]
        gram += inputs.T @ inputs
        moment += inputs.T @ targets
    solution = np.linalg.solve(gram + _PENALTY * np.eye(2 * size), moment)
    return mx.array(solution.T.astype(np.float32))


def _unit(states: mx.array) -> mx.array:
    return mx.fast.rms_norm(states, None, 1e-5)


def _take_over(layer: Any, source: Any) -> None:
    """Copy norms and the input projections of one decoder layer into another of its kind, unquantised."""
    for name in ("input_layernorm", "post_attention_layernorm"):
        getattr(layer, name).weight = getattr(source, name).weight.astype(mx.float32)
    for part, names in (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj"))):
        for name in names:
            getattr(getattr(layer, part), name).weight = _dense(getattr(getattr(source, part), name))


def _dense(projection: Any) -> mx.array:
    weight: mx.array = projection.weight
    if "scales" in projection:
        weight = mx.dequantize(
            weight, projection.scales, projection.biases, group_size=projection.group_size, bits=projection.bits
        )
    return weight.astype(mx.float32)
