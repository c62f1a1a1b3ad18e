"""Tiny models with layers of other kinds than full attention: windows, chunks, states, latents, sinks, softcaps.

Each has four layers that see every token, as many as the plain tiny models have, so that the same cases run on it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers import PreTrainedModel

from harness.checks.families import tiny_family

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
