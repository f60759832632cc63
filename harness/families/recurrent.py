"""What families with recurrent or convolutional layers publish beyond the usual keys."""

from __future__ import annotations

from typing import Any

from harness.families.sizes import CONTEXT, WINDOW

_LINEAR = {
    "kda_layers": [1, 3],
    "num_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
    "full_attn_layers": [2, 4],
}
_HYBRID: dict[str, Any] = {"num_hidden_layers": 4, "full_attention_interval": 2}

RECURRENT: dict[str, dict[str, Any]] = {
    "baichuan_m1": {
        "num_hidden_layers": 4,
        "sliding_window_layers": [0, 2],
        "conv_window": 2,
        "num_swa_attention_heads": 4,
        "num_swa_key_value_heads": 2,
    },
    "bailing_hybrid": {"num_hidden_layers": 4, "n_group": 2},
    "bailing_moe_linear": {"num_hidden_layers": 4, "partial_rotary_factor": 0.5, "use_qk_norm": True, "n_group": 2},
    "bailing_moe_v3": {
        "model_type": "bailing_hybrid",
        "architectures": ["BailingMoeV3ForCausalLM"],
        "num_hidden_layers": 4,
        "short_conv_kernel_size": 4,
        "n_group": 2,
    },
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_chunk_size": 32,
        "attention_out_multiplier": 0.9,
        "key_multiplier": 0.6,
        "lm_head_multiplier": 0.3,
        "mlp_multipliers": [0.9, 0.6],
        "ssm_multipliers": [0.4, 0.3, 0.4, 0.5, 0.4],
        "ssm_out_multiplier": 0.3,
    },
    "gear": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "conv_mixer"],
        "rope_local_base_freq": 5000.0,
    },
    "granitemoehybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "position_embedding_type": "nope",
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k3:TextArgs": {
        "model_type": "kimi_linear",
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "linear_attn_config": _LINEAR,
        "hidden_act": "situ",
        "num_experts_per_token": 2,
        "mla_use_output_gate": True,
        "attn_res_block_size": 2,
    },
    "kimi_linear": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "linear_attn_config": _LINEAR,
        "model_max_length": CONTEXT,
        "num_experts_per_token": 2,
    },
    "lfm2": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "use_expert_bias": True,
        "num_dense_layers": 1,
    },
    "longcat_flash_ngram": {
        "ffn_hidden_size": 96,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "num_layers": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "ngram_vocab_size_ratio": 3,
        "emb_neighbor_num": 3,
        "emb_split_num": 2,
    },
    "mamba": {"intermediate_size": 128},
    "mamba2": {"num_heads": 8, "n_groups": 1, "intermediate_size": 128},
    "nemotron_h": {
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M*E-",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 32,
    },
    "olmo_hybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_allow_neg_eigval": True,
    },
    "plamo2": {
        "num_hidden_layers": 4,
        "hidden_size_per_head": 16,
        "attention_window_size": WINDOW,
        "full_attention_idx": [3],
        "mamba_num_heads": 4,
        "mamba_step": 2,
        "mamba_chunk_size": 32,
    },
    "prism_hadamard_qwen35": {
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": "model.layers.1.mlp.gate_proj", "embedding": False, "dtype": "float16", "block": 0},
            {"path": "model.layers.3.mlp.up_proj", "embedding": False, "dtype": "float16", "block": 0},
        ],
        "text_config": {"model_type": "qwen3_5_text", "hidden_size": 128},
    },
    "qwen3_5_moe": {"text_config": {"model_type": "qwen3_5_moe_text", "num_experts": 4}},
    "qwen3_5:TextModelArgs": {"model_type": "qwen3_5_text", **_HYBRID, "num_experts": 0},
    "qwen3_next": {**_HYBRID, "partial_rotary_factor": 0.5},
    "recurrent_gemma": {
        "num_hidden_layers": 4,
        "conv1d_width": 4,
        "logits_soft_cap": 3.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention"],
        "num_key_value_heads": 1,
        "intermediate_size": 96,
    },
    "rwkv7": {"a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8},
}
