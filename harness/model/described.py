"""A model's shape as a transformers configuration, without its weights: of its source, or of its file in `conf/model`.

A shape that no decoder can have is refused here, before anything is built of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness.errors import UserError, refused
from harness.model.checkpoint import read_config
from harness.model.gguf import converted
from harness.model.shape import ModelShape
from harness.model.source import PACKAGE, located
from harness.settings.sources import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SIZES = (
    "hidden_size", "intermediate_size", "ffn_dim", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "max_position_embeddings",
)  # fmt: skip
"""What a config.json calls a decoder's sizes."""


def model_config(config: ModelConfig) -> PreTrainedConfig:
    """The model's shape as a transformers config, without reading its weights.

    It comes from `path`, else from `shape`, else from the hub.

    Raises:
        UserError: there is no such source, it describes no model, or the family is not supported.
    """
    return as_config(config.name, shape_mapping(config))


def as_config(name: str, mapping: Mapping[str, Any]) -> PreTrainedConfig:
    """What a config.json or a `shape` describes; raises as `model_config`."""
    from transformers import AutoConfig

    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as SUPPORTED_FAMILIES

    settings = dict(mapping)
    model_type = settings.pop("model_type", None)
    if model_type not in SUPPORTED_FAMILIES:
        raise UserError(
            f"model {name}: its family {model_type!r} is not supported; supported: {', '.join(SUPPORTED_FAMILIES)}"
        )
    for key in SIZES:
        size = settings.get(key)
        if size is not None and not (type(size) is int and size >= 1):
            raise UserError(f"model {name}: its shape is not valid: {key}={size} must be a whole number above 0")
    with refused(f"model {name}: its shape is not valid"):
        described = AutoConfig.for_model(model_type, **settings)
        sizes = ModelShape.from_config(name, described.to_dict())
    if sizes.num_heads % sizes.num_kv_heads:
        several = f"num_attention_heads={sizes.num_heads} is no multiple of num_key_value_heads={sizes.num_kv_heads}"
        raise UserError(f"model {name}: its shape is not valid: {several}")
    return described


def shape_mapping(config: ModelConfig) -> dict[str, Any]:
    """What a model's source says of its shape, as in config.json; raises UserError where there is no such source."""
    if config.shape and not config.path:
        return dict(config.shape)
    found = located(config, weights=False)
    return read_config(converted(found) if found.suffix == ".gguf" else found)


def require_as_described(config: ModelConfig, found: Mapping[str, Any]) -> None:
    """Raise UserError where the config.json beside the weights, `found`, says another family or size than
    `config.shape`, by which grids and estimates go."""
    expected = dict(config.shape or {})
    other = [key for key in ("model_type", *SIZES) if key in expected and key in found and found[key] != expected[key]]
    if other:
        holds, says = (", ".join(f"{key}={each[key]}" for key in other) for each in (found, expected))
        raise UserError(
            f"model={config.name}: {config.path or config.hub_id or PACKAGE} holds a model of {holds}, and "
            f"conf/model says {says}; model.shape=null takes it as it is"
        )
