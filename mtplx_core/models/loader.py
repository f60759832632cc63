"""Loads any mlx-lm model from a folder or a hub id and says what it is: identity, bounds, tokenizer files.

Call it on the thread that will run the model: MLX arrays belong to the thread that made them. No text is handled
here; the tokenizer's files are bytes to pass on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import snapshot_download
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import _get_classes
from mlx_lm.utils import load_model as load_mlx_model

from mtplx_core.errors import ModelLoadError
from mtplx_core.heads.tensors import has_bare_names, is_head_name, load_files
from mtplx_core.models.fingerprint import model_digest
from mtplx_core.models.generation_config import FILE_NAME, read_generation_config

# What rendering chat, tokenising and sampling need and nothing else: these files travel to other machines.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    "added_tokens.json",
    FILE_NAME,
)
_HUB_PATTERNS = ("*.json", "model*.safetensors", "*mtp*.safetensors", "*.jinja")
_CONTEXT_KEYS = (
    "max_position_embeddings",
    "max_sequence_length",
    "max_seq_len",
    "max_context_length",
    "seq_length",
    "n_positions",
    "model_max_length",
    "block_size",
)
UNBOUNDED_CONTEXT = 2**31 - 1
"""Context length of a model of which nothing grows with the row: recurrent states and sliding windows only."""
_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model in memory and everything a lane says about it."""

    model: Module
    path: Path
    name: str
    identity: str
    """`name@<12 hex>`: a hash of weights, config and tokenizer. Equal identities may share work."""
    vocab_size: int
    """Width of the logits."""
    eos_token_ids: frozenset[int]
    """Those of its configuration and of its `generation_config.json` together."""
    max_context: int
    """Longest sequence the model was made for."""
    tokenizer_files: Mapping[str, bytes]
    config: Mapping[str, Any]
    dtype: mx.Dtype
    """Type of the logits; ties are counted in its ulps."""


def load_model(
    source: str | Path, *, cache_dir: Path | None = None, name: str | None = None, is_lazy: bool = False
) -> LoadedModel:
    """Load the model in folder `source`, or of hub id `source`.

    Args:
        cache_dir: where weight hashes are remembered by size and time; None hashes anew.
        name: what the model is called from here on; by default the last part of `source`.
        is_lazy: leave the weights on disk until `read_weights`, or until they are first used.

    Raises:
        ModelLoadError: it is not there, or mlx-lm cannot load it.
    """
    path = _find(source)
    try:
        classes = partial(model_classes, bare_names=_bare_names(path))
        model, config = load_mlx_model(path, lazy=is_lazy, get_model_classes=classes)
        vocab_size, dtype = _logits_type(model)
    except (Exception, SystemExit) as error:
        # mlx-lm's parts raise errors of every kind, and one of its modules ends the process where a package is
        # missing; all of it means: not loadable.
        raise ModelLoadError(f"cannot load {source}: {_in_words(error)}") from error
    name = name or Path(source).name
    files = _tokenizer_files(path)
    return LoadedModel(
        model=model,
        path=path,
        name=name,
        identity=f"{name}@{model_digest(path, tokenizer_files=files, cache_dir=cache_dir)[:12]}",
        vocab_size=vocab_size,
        eos_token_ids=_end_tokens(path, files),
        max_context=_max_context(config, model),
        tokenizer_files=files,
        config=config,
        dtype=dtype,
    )


def read_weights(loaded: LoadedModel) -> None:
    """Bring all weights into memory, on the thread that loaded the model."""
    mx.eval(loaded.model.parameters())  # type: ignore[no-untyped-call]  # mlx annotates in part


def weight_bytes(loaded: LoadedModel) -> int:
    """Memory the weights take."""
    leaves: Any = tree_flatten(loaded.model.parameters())  # type: ignore[no-untyped-call]  # mlx annotates in part
    return sum(array.nbytes for _, array in leaves)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that describes the text model, where it is a part; else nothing."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else {}


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether the model is a mixture of experts."""
    described = {**config, **text_config(config)}
    return any(int(described.get(key) or 0) > 1 for key in _EXPERT_KEYS)


def model_classes(config: dict[str, Any], *, bare_names: frozenset[str] = frozenset()) -> tuple[Any, Any]:
    """mlx-lm's classes for a model, the first of which leaves a head's weights alone.

    Most of mlx-lm's models drop them, but not out of every checkpoint, and a name too many fails the load.

    Args:
        bare_names: weights of a head that do not say so by themselves.
    """
    kind, args_kind = _get_classes(config)

    def sanitize(self: Any, weights: dict[str, mx.array]) -> Any:
        kept = {name: weight for name, weight in weights.items() if not is_head_name(name) and name not in bare_names}
        return kind.sanitize(self, kept) if hasattr(kind, "sanitize") else kept

    return type(kind.__name__, (kind,), {"sanitize": sanitize}), args_kind


def is_local(source: str | Path) -> bool:
    """Whether a source is a folder; else it looks like a hub id.

    Raises:
        ModelLoadError: it is neither.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return True
    if path.is_absolute() or str(source).startswith((".", "~")) or str(source).count("/") != 1:
        raise ModelLoadError(f"no model folder at {source}")
    return False


def _find(source: str | Path) -> Path:
    if is_local(source):
        return Path(source).expanduser().resolve()
    try:
        return Path(snapshot_download(str(source), allow_patterns=list(_HUB_PATTERNS)))
    except Exception as error:  # the hub client's errors share no base class
        raise ModelLoadError(f"neither a folder nor a hub id that can be fetched: {source} ({error})") from error


def _bare_names(path: Path) -> frozenset[str]:
    """Weights in files of a head's own without a prefix: mlx-lm reads those called `model*` as the trunk's.

    Raises:
        ModelLoadError: the trunk has weights of the same names.
    """
    files = load_files(path)
    bare = {name for file, tensors in files.items() if has_bare_names(file, tensors) for name in tensors}
    trunk = {name for file, tensors in files.items() if not has_bare_names(file, tensors) for name in tensors}
    if both := sorted(bare & trunk):
        raise ModelLoadError(f"{both[0]} is the name of a weight of the trunk and of the head in a file of its own")
    return frozenset(bare)


def _tokenizer_files(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in TOKENIZER_FILES if (path / name).is_file()}


def _logits_type(model: Module) -> tuple[int, mx.Dtype]:
    """Width and type of the logits, from the graph of one forward that is never evaluated."""
    logits = model(mx.array([[0]]))
    return int(logits.shape[-1]), logits.dtype


def _end_tokens(path: Path, files: Mapping[str, bytes]) -> frozenset[int]:
    # From the file, since in mlx-lm's configuration those of generation_config.json stand in place of its own.
    config = json.loads((path / "config.json").read_bytes())
    return read_generation_config(files).eos_token_ids.union(_eos_ids(config))


def _eos_ids(config: Mapping[str, Any]) -> Iterable[int]:
    value = config.get("eos_token_id", text_config(config).get("eos_token_id"))
    if value is None:
        return ()
    return [int(v) for v in value] if isinstance(value, list) else [int(value)]


def _max_context(config: Mapping[str, Any], model: Module) -> int:
    for source in (config, text_config(config)):
        for key in _CONTEXT_KEYS:
            if isinstance(source.get(key), int):
                return int(source[key])
    if all(isinstance(cache, ArraysCache | RotatingKVCache) for cache in make_prompt_cache(model)):
        return UNBOUNDED_CONTEXT
    raise ModelLoadError(f"the model's config names no context length (looked for {', '.join(_CONTEXT_KEYS)})")


def _in_words(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "mlx-lm's module for it ended the process; it needs a package that is not installed"
    return str(error)
