"""The models of `conf/model` in miniature: all that is special about each, with random weights, in a few layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from harness.model.shape import as_config, read_yaml
from harness.model.tiny import with_no_constants
from harness.settings.schema import CONF_DIR

PRESETS = sorted(path.stem for path in (CONF_DIR / "model").glob("*.yaml"))
HEADS, HEAD_DIM = 4, 16
SMALL = {
    "vocab_size": 256, "max_position_embeddings": 512, "num_attention_heads": HEADS, "head_dim": HEAD_DIM,
    "intermediate_size": 96, "ffn_dim": 96, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "initializer_range": 0.1, "init_std": 0.1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
"""Sizes of a miniature, by their names in configurations; weights are wide enough to avoid ties."""


def preset_shape(name: str) -> dict[str, Any]:
    """The published shape in `conf/model/<name>.yaml`."""
    return dict(read_yaml(CONF_DIR / "model" / f"{name}.yaml")["shape"])


def tiny_preset(name: str) -> PreTrainedModel:
    """The preset's shape, shrunk, with random weights and eager attention, on the CPU in float32."""
    torch.manual_seed(0)
    described = as_config(name, shrunk(preset_shape(name)))
    model = AutoModelForCausalLM.from_config(described, attn_implementation="eager", dtype=torch.float32)
    return with_no_constants(model, bias_std=0.1)


def shrunk(shape: Mapping[str, Any]) -> dict[str, Any]:
    """The shape with small sizes and at least 4 layers: each kind of layer twice or more, one kind after the other.

    Kept are the ratio of hidden_size to the size of all heads, whether heads share a KV head, and the kinds of rotary
    embedding, with the lengths in them scaled as max_position_embeddings is.
    """
    full = as_config("preset", shape).to_dict()
    small = full | {name: value for name, value in SMALL.items() if full.get(name) is not None}
    heads, hidden_size = full["num_attention_heads"], full["hidden_size"]
    head_dim = full.get("head_dim") or hidden_size // heads
    small["hidden_size"] = 4 * round(HEADS * HEAD_DIM * hidden_size / (heads * head_dim) / 4)
    if "num_key_value_heads" in full:
        small["num_key_value_heads"] = HEADS if full["num_key_value_heads"] == heads else HEADS // 2
    if "word_embed_proj_dim" in full:
        small["word_embed_proj_dim"] = small["hidden_size"]
    if "query_pre_attn_scalar" in full:
        small["query_pre_attn_scalar"] = full["query_pre_attn_scalar"] * HEAD_DIM // head_dim

    layers = [same[0] for same in kinds_of_layer(full).values()]
    layers *= max(2, 4 // len(layers))
    small["num_hidden_layers"] = len(layers)
    small |= {name: [values[layer] for layer in layers] for name, values in of_each_layer(full).items()}
    return _rescaled(small, SMALL["max_position_embeddings"] / full["max_position_embeddings"])


def of_each_layer(shape: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The settings that are lists with a value for each layer, such as `layer_types`."""
    lists = {name: value for name, value in shape.items() if isinstance(value, list) and not name.endswith("token_id")}
    return {name: value for name, value in lists.items() if len(value) == shape["num_hidden_layers"]}


def kinds_of_layer(shape: Mapping[str, Any]) -> dict[str, list[int]]:
    """The layers of each kind, in order of the first. Layers are of one kind if all their settings are the same."""
    kinds: dict[str, list[int]] = {}
    for layer in range(shape["num_hidden_layers"]):
        kinds.setdefault(str({name: value[layer] for name, value in of_each_layer(shape).items()}), []).append(layer)
    return kinds


def _rescaled(settings: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """The settings with each `original_max_position_embeddings`, nested ones included, times `factor`."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            value = _rescaled(value, factor)
        found[name] = int(value * factor) if name == "original_max_position_embeddings" and value else value
    return found
