"""What each family publishes beyond the usual keys, and where its text model lies in the configuration."""

from __future__ import annotations

from typing import Any

from harness.families.dense import DENSE
from harness.families.experts import EXPERTS
from harness.families.recurrent import RECURRENT

NESTED: dict[str, str] = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n:TextConfig",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "kimi_k3": "kimi_k3:TextArgs",
    "kimi_vl": "kimi_vl:TextArgs",
    "lfm2-vl": "lfm2",
    "llama4": "llama4:TextArgs",
    "minimax_m3_vl": "minimax_m3_vl:TextArgs",
    "mistral3": "ministral3",
    "muse_spark": "muse_spark:TextArgs",
    "pixtral": "llama",
    "prism_hadamard_qwen35": "qwen3_5:TextModelArgs",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5:TextModelArgs",
    "qwen3_5_moe": "qwen3_5:TextModelArgs",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
"""Families whose configuration holds a `text_config`, and the arguments it fills: `module` or `module:class`."""

CONTEXT_ELSEWHERE = {
    "dbrx",
    "gpt2",
    "gpt_bigcode",
    "gptj",
    "kimi_linear",
    "lille-130m",
    "mamba",
    "mamba2",
    "openelm",
    "recurrent_gemma",
}
"""Families that publish no `max_position_embeddings`; some of them publish no bound at all."""

OWN: dict[str, dict[str, Any]] = {**DENSE, **EXPERTS, **RECURRENT}
"""By family, or by `module:class` where the text model's arguments are no family of their own."""
