"""Tiny models with layers of other kinds than full attention: windows, chunks, states, latents, sinks, softcaps.

Each has four layers that see every token, as many as the plain tiny models have, so that the same cases run on it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers import PreTrainedModel

from harness.model.tiny import tiny_model

WINDOW = 16
HEADS = {"num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


def one_of_three(kind: str) -> dict[str, Any]:
    """Six layers: one of `kind`, two that see every token, and again."""
    return {"num_hidden_layers": 6, "layer_types": [kind, "full_attention", "full_attention"] * 2}


SLIDING = {**HEADS, **one_of_three("sliding_attention"), "sliding_window": WINDOW}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {**SLIDING, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", {**SLIDING, "query_pre_attn_scalar": 16}),
    "gpt_oss": (
        "gpt_oss",
        {
            **SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "llama4": (
        "llama4_text",
        {
            **HEADS, **one_of_three("chunked_attention"), "attention_chunk_size": WINDOW,
            "no_rope_layers": [1, 0, 1] * 2, "attn_temperature_tuning": False, "num_local_experts": 4,
            "interleave_moe_layer_step": 2, "intermediate_size": 32, "intermediate_size_mlp": 96,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **HEADS, **one_of_three("linear_attention"), **EXPERTS, "num_experts": 4,
            "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **EXPERTS, "num_key_value_heads": 4, "head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "kv_lora_rank": 24, "q_lora_rank": 20,
            "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
        },
    ),
}  # fmt: skip
LOCAL = ("gemma2", "gemma3", "gpt_oss", "llama4")
"""Those with a window or chunks of `WINDOW` tokens in two of their six layers."""


@cache
def mixed(name: str) -> PreTrainedModel:
    """A tiny random model, one for all tests."""
    model_type, shape = SHAPES[name]
    return tiny_model(model_type, **shape)
