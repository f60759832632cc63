"""The attached head: one decoder layer of the trunk's kind, trained for one trunk and kept beside it.

Owns the format on disk (a folder with `head.safetensors` and `head.json`) and the forward pass. Embedding and
unembedding are the trunk's own and are not stored. Training it is not done here.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask

from mtplx_core.errors import ModelLoadError
from mtplx_core.heads.tie import sample_trunk, worst_strain
from mtplx_core.models.trunk import Trunk, trunk_fingerprint

FORMAT = "mtplx-attached-head-2"
WEIGHTS_FILE = "head.safetensors"
DESCRIPTION_FILE = "head.json"
_TRUNK = "trunk."
"""Prefix of what is kept of the trunk."""

nn: Any = mlx.nn


class AttachedHead(nn.Module):  # type: ignore[misc]  # mlx.nn carries no types
    """norm(layer(fc([norm(embedding of t + 1), norm(hidden at t)]))), unembedded over the draft vocabulary.

    A fresh head has fc = [0 | I] and a layer that adds nothing: it hands on the trunk's own hidden state.

    Args:
        trunk: gives embedding, unembedding and the kind of layer.
        draft_ids: ascending token ids it may draft.
        max_depth: tokens it is trained to draft in a row.
        name: shown in snapshots.
    """

    def __init__(self, trunk: Trunk, draft_ids: list[int], *, max_depth: int = 1, name: str = "attached") -> None:
        super().__init__()
        size = trunk.hidden_size
        eps = float(trunk.args.rms_norm_eps)
        self.embedding_norm = nn.RMSNorm(size, eps)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.fc.weight = mx.concatenate([mx.zeros((size, size)), mx.eye(size)], axis=1)
        self.layer = _new_layer(trunk)
        _silence(self.layer)
        self.norm = nn.RMSNorm(size, eps)
        self.norm.weight = trunk.final_norm_weight.astype(mx.float32)
        self._name = name
        self._max_depth = max_depth
        self._trunk = trunk
        self._draft_ids = mx.array(sorted(set(draft_ids)), mx.int32)
        self._project = trunk.logits_of(self._draft_ids)

    @property
    def name(self) -> str:
        return self._name

    @property
    def max_depth(self) -> int:
        return self._max_depth

    @property
    def draft_ids(self) -> mx.array:
        return self._draft_ids

    @property
    def cached_layers(self) -> int:
        return 1

    def __call__(
        self, hidden: mx.array, tokens: mx.array, cache: list[Any] | None = None, mask: Any = "causal"
    ) -> mx.array:
        return self.forward(hidden, self._trunk.embed(tokens), cache, mask=mask)

    def forward(
        self, hidden: mx.array, embedded: mx.array, cache: list[Any] | None = None, *, mask: Any = "causal"
    ) -> mx.array:
        """As a call, with the tokens' embeddings (rows, positions, hidden) instead of the tokens."""
        pair = mx.concatenate([self.embedding_norm(embedded), self.hidden_norm(hidden)], axis=-1)
        x = self.fc(pair)  # (rows, positions, hidden)
        own = None if cache is None else cache[0]
        seen = mask if own is None else create_attention_mask(x, own)
        predicted: mx.array = self.norm(self.layer(x, seen, own))
        return predicted

    def logits(self, hidden: mx.array) -> mx.array:
        return self._project(hidden)


def save_attached_head(
    head: AttachedHead, folder: Path, *, trained_on: str, facts: dict[str, Any] | None = None
) -> None:
    """Write a head so that `load_attached_head` takes it back for the same trunk and no other.

    Args:
        head: the head.
        folder: made if missing.
        trained_on: the identity of the model it was trained with, for people to read.
        facts: anything worth keeping about the training, as JSON values.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(head.parameters()))
    weights["draft_ids"] = head.draft_ids
    weights |= {_TRUNK + name: rows for name, rows in sample_trunk(head._trunk.model).items()}
    mx.save_safetensors(str(folder / WEIGHTS_FILE), weights)
    description = {
        "format": FORMAT,
        "name": head.name,
        "source": {"trunk": trunk_fingerprint(head._trunk.model), "trained_on": trained_on},
        "hidden_size": head._trunk.hidden_size,
        "draft_vocabulary": int(head.draft_ids.size),
        "max_depth": head.max_depth,
        "facts": facts or {},
    }
    (folder / DESCRIPTION_FILE).write_text(json.dumps(description, indent=2) + "\n")


def shipped_head(folder: Path, trunk: Trunk) -> Path | None:
    """The folder among those in `folder` whose head names this trunk; None when there is none."""
    wanted = trunk_fingerprint(trunk.model)
    for description in sorted(folder.glob(f"*/{DESCRIPTION_FILE}")):
        if json.loads(description.read_text())["source"]["trunk"] == wanted:
            return description.parent
    return None


def load_attached_head(folder: Path, trunk: Trunk) -> AttachedHead:
    """Read a head for this trunk, in the trunk's dtype.

    Raises:
        ModelLoadError: unreadable, or trained for another artifact.
    """
    description = _read_description(folder)
    wanted, found = description["source"]["trunk"], trunk_fingerprint(trunk.model)
    if wanted != found:
        trained_on = description["source"].get("trained_on", "another model")
        raise ModelLoadError(f"the head in {folder} was trained for {trained_on} ({wanted}), not for {found}")
    try:
        loaded: Any = mx.load(str(folder / WEIGHTS_FILE))
        weights: dict[str, mx.array] = dict(loaded)
        sample = {key.removeprefix(_TRUNK): weights.pop(key) for key in list(weights) if key.startswith(_TRUNK)}
        draft_ids: Any = weights.pop("draft_ids").tolist()
        head = AttachedHead(trunk, draft_ids, max_depth=int(description["max_depth"]), name=str(description["name"]))
        head.load_weights([(key, value.astype(trunk.dtype)) for key, value in weights.items()])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"the head in {folder} cannot be read: {error}") from error
    _require_tie(trunk, sample, folder, description)
    head.eval()
    mx.eval(head.parameters())
    return head


def _require_tie(trunk: Trunk, sample: dict[str, mx.array], folder: Path, description: dict[str, Any]) -> None:
    strain = worst_strain(trunk.model, sample)
    if strain.excess > 1:
        raise ModelLoadError(
            f"the head in {folder} was trained for {description['source'].get('trained_on', 'another model')}, and "
            f"{strain.name} holds other weights here than rounding explains: a finetune needs a head of its own"
        )


def _read_description(folder: Path) -> dict[str, Any]:
    try:
        description: dict[str, Any] = json.loads((folder / DESCRIPTION_FILE).read_text())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"no readable {DESCRIPTION_FILE} in {folder}: {error}") from error
    if description.get("format") != FORMAT:
        raise ModelLoadError(f"{folder / DESCRIPTION_FILE} is not of format {FORMAT}")
    missing = {"source", "max_depth", "name"} - description.keys()
    if missing:
        raise ModelLoadError(f"{folder / DESCRIPTION_FILE} lacks {', '.join(sorted(missing))}")
    return description


def _new_layer(trunk: Trunk) -> Any:
    """An untrained decoder layer of the kind of the trunk's last one, always with full attention."""
    kind = type(trunk.layers[-1])
    if "layer_idx" in inspect.signature(kind.__init__).parameters:
        return kind(trunk.args, layer_idx=len(trunk.layers) - 1)
    return kind(trunk.args)


def _silence(layer: Any) -> None:
    layer.self_attn.o_proj.weight = mx.zeros_like(layer.self_attn.o_proj.weight)
    layer.mlp.down_proj.weight = mx.zeros_like(layer.mlp.down_proj.weight)
