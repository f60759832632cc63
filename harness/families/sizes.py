"""The sizes of the tiny checkpoints: what most families call a thing, and how small it is here.

Query heads outnumber key heads, windows are shorter than every prompt worth testing, and no scale is one.
"""

from __future__ import annotations

from typing import Any

CONTEXT = 512
WINDOW = 8

USUAL: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": WINDOW,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    # Mixtures of experts.
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    # Latent attention.
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # Indexers of sparse attention.
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 12,
    # Recurrent layers.
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "conv_kernel": 4,
    "state_size": 16,
    "ssm_state_size": 16,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 4,
    "time_step_limit": [0.0, 100.0],
    "conv_L_cache": 3,
    "conv_bias": False,
    "layer_group_size": 2,
    "group_norm_size": 2,
    # Scales that a lane must not lose.
    "logits_scaling": 2.0,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "logit_scale": 0.5,
    "final_logit_softcapping": 3.0,
    "attn_logit_softcapping": 5.0,
    "query_pre_attn_scalar": 9.0,
    "scale_emb": 3.0,
    "scale_depth": 1.4,
    "dim_model_base": 32,
    "output_multiplier": 0.4,
}
"""Keys that several families publish; a family's config has those of them that it reads."""

EMBEDDED: dict[str, Any] = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": CONTEXT, "n_ctx": CONTEXT}
"""The names of GPT-2 and what follows it."""

LAYERED: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
MANY_KEY_HEADS: dict[str, Any] = {"num_key_value_heads": 4}
"""Latent attention has as many key heads as query heads."""
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "rope_theta": 10000.0,
}
