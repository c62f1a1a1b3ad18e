"""Tiny random models, on which every equality that must hold is checked in seconds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 256
MAX_LENGTH = 512


def tiny_model(model_type: str, **overrides: Any) -> PreTrainedModel:
    """A random model: 4 layers, hidden size 64, 4 query heads; wide weights avoid ties."""
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


def tiny_ids(text: str) -> list[int]:
    """Token ids of a text for a tiny model, which has no tokenizer: one for each byte."""
    return [3 + byte % (VOCAB_SIZE - 3) for byte in text.encode()]


def with_no_constants(model: PreTrainedModel, bias_std: float) -> PreTrainedModel:
    """The model, ready to run, with random numbers for what is initialised to a constant and could
    be forgotten: biases and sinks, which are often 0, and norms, which are 1."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sink", "sinks")):
                parameter.normal_(std=bias_std)
            elif "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval().requires_grad_(False)
