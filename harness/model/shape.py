"""A decoder's sizes by its configuration: for the cost model, as a transformers config, in memory.

Importing it loads no model library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UserError, nearest, question, refused
from harness.files import HOST_HINT, available_bytes
from harness.settings.schema import CONF_DIR, options

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

GIB = 2**30
WEIGHT_BYTES = 2
"""Bytes of a weight, and of an element of the cache: fp16 throughout, as in the paper."""
SIZES = (
    "hidden_size", "intermediate_size", "ffn_dim", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
)  # fmt: skip
"""Names of a decoder's sizes in config.json."""
NESTED = "text_config"
"""Where the config.json of a multimodal model has its text decoder's."""
FFN_MATRICES = {
    "opt": 2,
    "gpt_neox": 2,
    "llama": 3,
    "mistral": 3,
    "phi3": 3,
    "qwen2": 3,
    "qwen3": 3,
}
"""Matrices of an FFN in the families that the cost model knows: 3 where it is gated. Their layers
are all alike."""


def size(described: PreTrainedConfig, name: str) -> int | None:
    """One of a decoder's sizes; None where there is no such size, or one for each layer."""
    try:
        found = getattr(described, name, None)
    except RuntimeError:  # transformers' AmbiguousGlobalPerLayerAttributeError
        return None
    return found if type(found) is int else None


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder of equal layers, for the cost model; without biases and norms."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    ffn_matrices: int
    vocab_size: int
    num_vocab_matrices: int

    @classmethod
    def from_config(cls, name: str, config: Mapping[str, Any]) -> ModelShape:
        """The sizes in a plain transformers config; UserError for a family not in FFN_MATRICES."""
        shape = {key: value for key, value in config.items() if value is not None}
        family = shape["model_type"]
        if family not in FFN_MATRICES:
            known = ", ".join(FFN_MATRICES)
            raise UserError(f"model={name}: the cost model knows {known}, and not {family}")
        heads = shape["num_attention_heads"]
        return cls(
            name=name,
            num_layers=shape["num_hidden_layers"],
            hidden_size=shape["hidden_size"],
            num_heads=heads,
            num_kv_heads=shape.get("num_key_value_heads", heads),
            head_dim=shape.get("head_dim", shape["hidden_size"] // heads),
            ffn_size=shape["ffn_dim" if family == "opt" else "intermediate_size"],
            ffn_matrices=FFN_MATRICES[family],
            vocab_size=shape["vocab_size"],
            num_vocab_matrices=1 if shape.get("tie_word_embeddings", family == "opt") else 2,
        )

    @property
    def query_size(self) -> int:
        """Elements of a token's queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of a token's keys in one layer; as many of its values."""
        return self.num_kv_heads * self.head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of a cached token in one layer, K and V in fp16."""
        return 2 * self.kv_size * WEIGHT_BYTES

    @property
    def attention_weights(self) -> int:
        """Weights of the four projections."""
        return self.hidden_size * (2 * self.query_size + 2 * self.kv_size)

    @property
    def ffn_weights(self) -> int:
        """Weights of the FFN."""
        return self.ffn_matrices * self.hidden_size * self.ffn_size

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's weights."""
        return WEIGHT_BYTES * (self.attention_weights + self.ffn_weights)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, embedding and output head included."""
        vocabulary = self.num_vocab_matrices * self.vocab_size * self.hidden_size
        return self.num_layers * self.block_bytes + WEIGHT_BYTES * vocabulary


def load_shape(name: str) -> ModelShape:
    """The shape in `conf/model/<name>.yaml`; UserError where it is unknown or not modelled."""
    if name not in options("model"):
        raise UserError(f"model={name}: {nearest(name, options('model'))}")
    return ModelShape.from_config(name, read_yaml(CONF_DIR / "model" / f"{name}.yaml")["shape"])


@cache
def read_yaml(path: Path) -> Mapping[str, Any]:
    """A YAML file of the project as a plain mapping; read once."""
    from omegaconf import OmegaConf  # needless where a model says its own shape

    node = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}


# Configurations of transformers


def as_config(name: str, mapping: Mapping[str, Any]) -> PreTrainedConfig:
    """The text decoder that a config.json or a `shape` describes; raises as `model_config`."""
    from transformers import CONFIG_MAPPING, __version__
    from transformers.models.auto import modeling_auto as auto

    settings = dict(mapping)
    model_type = settings.pop("model_type", None)
    decoders = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    def unsupported(why: str) -> UserError:
        allowed = f"decoders of transformers {__version__} (AutoModelForCausalLM)"
        return UserError(
            f"model {name}: model_type={model_type} is not supported: {why}allowed: {allowed}"
        )

    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise unsupported(question(model_type, decoders) if model_type else "")
    with refused(f"model {name}: its shape is not valid"):
        whole = CONFIG_MAPPING[model_type](**settings)
        text = whole.get_text_config(decoder=True)
    described = text if text.model_type in decoders else whole
    if whole.is_encoder_decoder:
        raise unsupported("it is an encoder-decoder; ")
    if described.model_type not in decoders:
        raise unsupported("it is no decoder; ")
    return described


# Do the weights fit?


def count_weights(what: str, described: PreTrainedConfig) -> int:
    """Weights that a configuration describes, without memory; UserError where it describes none."""
    import torch
    from transformers import AutoModelForCausalLM

    with refused(f"{what}: its configuration describes no model"), torch.device("meta"):
        return AutoModelForCausalLM.from_config(described).num_parameters()


def require_room(
    what: str, described: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise UserError where the weights do not fit the free memory of `device`."""
    needed = count_weights(what, described) * dtype.itemsize
    available = available_bytes(device)
    if needed <= available:
        return
    word = str(dtype).removeprefix("torch.")
    halved = ", or model.dtype=bfloat16" if word == "float32" and needed <= 2 * available else ""
    more = "" if device.type == "cuda" else f"; {HOST_HINT}"
    raise UserError(
        f"{what} needs {needed / GIB:.1f} GiB of {device.type} memory for its weights in "
        f"{word} and {available / GIB:.1f} GiB are available; choose a smaller model{halved}{more}"
    )
