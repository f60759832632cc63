"""Random models of families that do something between their hidden states and their logits."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from mtplx_core.models.loader import LoadedModel

VOCAB_SIZE = 160
_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "rope_theta": 1e4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-untied": {"tie_word_embeddings": False},
    "granite": {
        "logits_scaling": 8.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.2,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "cohere": {"logit_scale": 0.0625},
    "gemma2": {"head_dim": 16, "final_logit_softcapping": 2.0},
    "minicpm": {"dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 12, "tie_word_embeddings": False},
    "gpt_neox": {"layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.25},
}


def tiny_model(name: str, **changes: Any) -> LoadedModel:
    """A random float32 model of a family, wide enough in its weights for logits that differ.

    Args:
        name: a key of `CONFIGS`.
        changes: to the family's configuration.
    """
    family = name.partition("-")[0]
    config = {"model_type": family, **_COMMON, **CONFIGS[name], **changes}
    module: Any = import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(config))
    keys = iter(mx.random.split(mx.random.key(5), 256))
    model.update(
        tree_map(lambda a: mx.random.normal(a.shape, key=next(keys)) * 0.25 if a.ndim > 1 else a, model.parameters())
    )
    mx.eval(model.parameters())
    return LoadedModel(
        model=model,
        path=Path("/nonexistent") / name,
        name=name,
        identity=f"{name}@000000000000",
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({2}),
        max_context=256,
        tokenizer_files={},
        config=config,
        dtype=mx.float32,
    )
