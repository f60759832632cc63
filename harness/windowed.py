"""Small random models of the families whose layers see sliding windows, with unequal head counts."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map_with_path

from mtplx_core.models.loader import LoadedModel

WINDOW = 8
VOCAB_SIZE = 96
_SLIDING, _FULL = "sliding_attention", "full_attention"
_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
_USUAL: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "sliding_window": WINDOW,
}
_LAYERS = {"layer_types": [_SLIDING, _FULL, _SLIDING, _FULL]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_shared_experts": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {**_LAYERS, **_EXPERTS, "num_dense_layers": 2},
    "cohere2": {"sliding_window_pattern": 2},
    "exaone4": {"sliding_window_pattern": "LG", "rope_scaling": None},
    "exaone_moe": {**_LAYERS, **_EXPERTS, "is_moe_layer": [False, False, True, True]},
    "gemma3_text": {"sliding_window_pattern": 2, "rope_local_base_freq": 1000.0, "query_pre_attn_scalar": 12},
    "gemma4_text": {
        "sliding_window_pattern": 2,
        "global_head_dim": 24,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "use_double_wide_mlp": False,
    },
    "gpt_oss": {**_LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "iquestloopcoder": {"loop_window_size": WINDOW},
    "laguna": {
        **_LAYERS,
        **_EXPERTS,
        "num_attention_heads_per_layer": [6, 4, 6, 4],
        "shared_expert_intermediate_size": 16,
        "rope_parameters": {_SLIDING: _ROPE, _FULL: {**_ROPE, "partial_rotary_factor": 0.5}},
    },
    "llama": {**_LAYERS},
    "mellum": {**_LAYERS, **_EXPERTS, "norm_topk_prob": True, "rope_parameters": {_SLIDING: _ROPE, _FULL: _ROPE}},
    "mimo_v2_flash": {
        "num_experts_per_tok": 2,
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 0, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "moe_intermediate_size": 16,
        "n_shared_experts": None,
        "n_routed_experts": 4,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 1000.0,
        "swa_num_attention_heads": 6,
        "swa_num_key_value_heads": 3,
        "v_head_dim": 8,
        "swa_head_dim": 12,
        "swa_v_head_dim": 8,
        "partial_rotary_factor": 0.5,
    },
    "ministral3": {
        **_LAYERS,
        "rope_parameters": {**_ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16},
    },
    "muse_glimmer": {**_LAYERS},
    "olmo3": {**_LAYERS},
    "plamo3": {"sliding_window_pattern": 2, "window_size": WINDOW},
    "spark2_5": {**_LAYERS, "rope_parameters": {_SLIDING: _ROPE, _FULL: _ROPE}},
    "step3p5": {
        **_LAYERS,
        "num_attention_groups": 2,
        "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 3},
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 16,
        "share_expert_dim": 16,
        "moe_layers_enum": "2,3",
    },
}

WRAPPED = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "mistral3": "ministral3"}
"""Models of several media, by the family of their text."""


@cache
def windowed_model(family: str, *, seed: int = 0) -> Any:
    """A random model in float32, the same for the same seed; windows of 8 tokens in two of four layers."""
    module = import_module(f"mlx_lm.models.{family}")
    text = WRAPPED.get(family, family)
    config = {"model_type": text, **_USUAL, **FAMILIES[text]}
    if family in WRAPPED:
        config = {"model_type": family, "text_config": config, "vocab_size": VOCAB_SIZE}
    model: Any = module.Model(module.ModelArgs.from_dict(config))
    keys = iter(mx.random.split(mx.random.key(seed), 512))

    def drawn(name: str, array: mx.array) -> mx.array:
        return mx.random.normal(array.shape, key=next(keys)) * 0.25 if array.ndim > 1 or "sink" in name else array

    model.update(tree_map_with_path(drawn, model.parameters()))
    mx.eval(model.parameters())
    return model


def windowed(family: str, *, seed: int = 0) -> LoadedModel:
    """The same as a loaded checkpoint."""
    return LoadedModel(
        model=windowed_model(family, seed=seed),
        path=Path(f"/nonexistent/tiny-{family}"),
        name=f"tiny-{family}",
        identity=f"tiny-{family}@{seed:012x}",
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({2}),
        max_context=_USUAL["max_position_embeddings"],
        tokenizer_files={},
        config={"model_type": family},
        dtype=mx.float32,
    )
