"""A decoder's sizes, as its configuration names them, and those that the cost model needs. Loads no model library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UserError, nearest
from harness.settings.choices import CONF_DIR, options

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WEIGHT_BYTES = 2
"""Bytes of a weight, and of an element of the cache: fp16 throughout, as in the paper."""
NESTED = "text_config"
"""What the config.json of a multimodal model calls its text decoder's."""
FFN_MATRICES = {"opt": 2, "gpt_neox": 2, "llama": 3, "mistral": 3, "phi3": 3, "qwen2": 3, "qwen3": 3}
"""Matrices of an FFN in the families that the cost model knows: 3 where it is gated. Their layers are all alike."""


def size(described: PreTrainedConfig, name: str) -> int | None:
    """One of a decoder's sizes; None where its configuration has no such size, or one for each layer."""
    try:
        found = getattr(described, name, None)
    except RuntimeError:  # transformers' AmbiguousGlobalPerLayerAttributeError
        return None
    return found if type(found) is int else None


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder whose layers are all alike, for the cost model; its weights carry no biases or norms."""

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
        """The sizes in a transformers config as a plain mapping; UserError for a family that is not in FFN_MATRICES."""
        shape = {key: value for key, value in config.items() if value is not None}
        family = shape["model_type"]
        if family not in FFN_MATRICES:
            raise UserError(f"model={name}: the cost model knows {', '.join(FFN_MATRICES)}, and not {family}")
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
    def num_weights(self) -> int:
        """Elements of all weights, embedding and output head included."""
        vocabulary = self.num_vocab_matrices * self.vocab_size * self.hidden_size
        return self.num_layers * (self.attention_weights + self.ffn_weights) + vocabulary

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return WEIGHT_BYTES * self.num_weights


def load_shape(name: str) -> ModelShape:
    """The shape in `conf/model/<name>.yaml`; UserError for an unknown model, and as `ModelShape.from_config`."""
    if name not in options("model"):
        raise UserError(f"model={name}: {nearest(name, options('model'))}")
    return ModelShape.from_config(name, read_yaml(CONF_DIR / "model" / f"{name}.yaml")["shape"])


@cache
def read_yaml(path: Path) -> Mapping[str, Any]:
    """A file of `conf/` as a plain mapping; read once."""
    from omegaconf import OmegaConf  # needless where a model says its own shape

    node = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}
