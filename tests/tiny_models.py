"""Tiny random models, on which every equality that must hold is checked in seconds.

The mixed ones have layers of other kinds than full attention: windows, chunks, states, latents, sinks, softcaps. Each
has four layers that see every token, as many as the plain ones have, so that the same cases run on it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from harness.checks.two_ways import VOCAB_SIZE, tiny_family, tiny_ids, with_no_constants

__all__ = ["VOCAB_SIZE", "tiny_ids"]  # for tests
MAX_LENGTH = 512

WINDOW = 16
LOCAL = ("gemma2", "gemma3_text", "gpt_oss", "llama4_text")
"""Those with a window or chunks of `WINDOW` tokens in two of their six layers."""
MIXED = (*LOCAL, "qwen3_next", "deepseek_v3")
OTHER_LAYERS = {"llama4_text": "chunked_attention", "qwen3_next": "linear_attention"}
MORE: dict[str, dict[str, Any]] = {"llama4_text": {"no_rope_layers": [1, 0, 1] * 2, "attn_temperature_tuning": False}}


@cache
def mixed(name: str) -> PreTrainedModel:
    """A tiny random model, one for all tests: six layers, of which two are of another kind, or four with latents."""
    if name == "deepseek_v3":
        return tiny_family(name)
    kinds = [OTHER_LAYERS.get(name, "sliding_attention"), "full_attention", "full_attention"]
    return tiny_family(name, num_hidden_layers=6, layer_types=kinds * 2, **MORE.get(name, {}))


def tiny_model(model_type: str, **overrides: Any) -> PreTrainedModel:
    """A plain random model: 4 layers, hidden size 64, 4 query heads; wide weights avoid ties."""
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_LENGTH,
        "initializer_range": 0.1,
        "init_std": 0.1,  # OPT's name for it
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "ffn_dim" if model_type == "opt" else "intermediate_size": 128,
        **overrides,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return with_no_constants(model, bias_std=0.1)
