"""A model's shape as a transformers configuration, without its weights: of its source, or of its file in `conf/model`.

The shape is that of the text decoder, which a multimodal checkpoint nests in its configuration. A shape that no decoder
can have is refused here, before anything is built of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness.errors import UserError, question, refused
from harness.model.checkpoint import read_config
from harness.model.gguf import converted
from harness.model.shape import NESTED, size
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
        UserError: there is no such source, or it describes no causal language model of transformers.
    """
    return as_config(config.name, _mapping(config))


def as_config(name: str, mapping: Mapping[str, Any]) -> PreTrainedConfig:
    """The text decoder that a config.json or a `shape` describes; raises as `model_config`."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    settings = dict(mapping)
    model_type = settings.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise _unsupported(name, model_type, question(model_type, CAUSAL) if model_type else "")
    nested = settings.get(NESTED)
    _require_sizes(name, settings)
    _require_sizes(name, nested if isinstance(nested, Mapping) else {})
    with refused(f"model {name}: its shape is not valid"):
        whole = CONFIG_MAPPING[model_type](**settings)
        text = whole.get_text_config(decoder=True)
    described = text if text.model_type in CAUSAL else whole
    if whole.is_encoder_decoder:
        raise _unsupported(name, model_type, "it is an encoder-decoder; ")
    if described.model_type not in CAUSAL:
        raise _unsupported(name, model_type, "it is no decoder; ")
    _require_causal(name, described)
    heads, kv_heads = size(described, "num_attention_heads"), size(described, "num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        several = f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
        raise UserError(f"model {name}: its shape is not valid: {several}")
    return described


def shape_mapping(config: ModelConfig) -> dict[str, Any]:
    """What a model's source says of its text decoder, as in config.json; UserError where there is no such source."""
    return _of_decoder(config.name, _mapping(config))


def require_as_described(config: ModelConfig, found: Mapping[str, Any]) -> None:
    """Raise UserError where the config.json beside the weights, `found`, says another family or size than
    `config.shape`, by which grids and estimates go."""
    if not config.shape:
        return
    expected, found = _of_decoder(config.name, config.shape), _of_decoder(config.name, found)
    other = [key for key in ("model_type", *SIZES) if key in expected and key in found and found[key] != expected[key]]
    if other:
        holds, says = (", ".join(f"{key}={each[key]}" for key in other) for each in (found, expected))
        raise UserError(
            f"model={config.name}: {config.path or config.hub_id or PACKAGE} holds a model of {holds}, and "
            f"conf/model says {says}; model.shape=null takes it as it is"
        )


def _mapping(config: ModelConfig) -> dict[str, Any]:
    if config.shape and not config.path:
        return dict(config.shape)
    found = located(config, weights=False)
    return read_config(converted(found) if found.suffix == ".gguf" else found)


def _of_decoder(name: str, mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping as it is; of a multimodal model the text decoder's, with the sizes that it leaves to the defaults."""
    return as_config(name, mapping).to_dict() if isinstance(mapping.get(NESTED), Mapping) else dict(mapping)


def _require_sizes(name: str, settings: Mapping[str, Any]) -> None:
    """Raise UserError where a size is no whole number above 0, or a list of such numbers, one for each layer."""
    for key in SIZES:
        given = settings.get(key)
        sizes = given if isinstance(given, list) and given else [given]
        if given is not None and not all(type(each) is int and each >= 1 for each in sizes):
            raise UserError(f"model {name}: its shape is not valid: {key}={given} must be a whole number above 0")


def _unsupported(name: str, model_type: object, why: str) -> UserError:
    """The refusal of a model_type that is no decoder of transformers."""
    from transformers import __version__

    decoders = f"decoders of transformers {__version__} (AutoModelForCausalLM)"
    return UserError(f"model {name}: model_type={model_type} is not supported: {why}allowed: {decoders}")


def _require_causal(name: str, described: PreTrainedConfig) -> None:
    """Raise UserError where tokens attend to later ones.

    Those of BERT and its kin do unless `is_decoder` is set. GPT-NeoX has the same setting and is causal either way; it
    has no class for masked language modelling.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

    settings = {"use_bidirectional_attention": (True, "all"), "is_causal": (False,)}
    if described.model_type in MASKED or described.model_type == "bert-generation":
        settings["is_decoder"] = (False,)
    for setting, bidirectional in settings.items():
        value = getattr(described, setting, None)
        if value in bidirectional:
            raise UserError(
                f"model {name}: {setting}={value} of model_type={described.model_type} is not supported: tokens would "
                "attend to later ones; allowed: causal attention"
            )
