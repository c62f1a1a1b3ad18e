"""What the cost model knows of a machine and of a model: data-sheet rates, and a decoder's shape.

Both are read from `conf/`: `conf/platform/<name>.yaml` with `kind: modelled`, and `shape` of `conf/model/<name>.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from harness.errors import UserError, nearest
from harness.settings.schema import build

CONF_DIR = Path(__file__).resolve().parents[3] / "conf"
WEIGHT_BYTES = 2
"""Bytes of a weight, and of an element of the cache: fp16 throughout, as in the paper."""


@dataclass(frozen=True)
class Platform:
    """A machine by its data sheets. `source` names them.

    flops_per_s: fp16 matrix products, dense. memory_bytes_per_s: device memory. device_bytes: its size.
    link_bytes_per_s: host to device from pinned memory, as achieved. host_channel_bytes_per_s: one channel of host
    memory, which bounds the one core that stages a copy from pageable memory.

    Raises:
        UserError: a rate or size that is not positive.
    """

    name: str
    kind: Literal["modelled"]
    source: str
    flops_per_s: float
    memory_bytes_per_s: float
    device_bytes: float
    link_bytes_per_s: float
    host_channel_bytes_per_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and value <= 0:
                raise UserError(f"platform.{field.name}={value:g} of {self.name}: must be above 0")

    @property
    def pageable_bytes_per_s(self) -> float:
        """Host to device from pageable memory: the driver copies into a pinned buffer (a read and a write of the
        channel per byte), then transfers."""
        return 1 / (1 / self.link_bytes_per_s + 2 / self.host_channel_bytes_per_s)


@dataclass(frozen=True)
class Efficiency:
    """What is achieved of a data-sheet rate, in (0, 1]; the only fitted numbers of the cost model.

    matmul: of `flops_per_s` by matrix products too large for the memory to bound them, which is prefill.
    memory: of `memory_bytes_per_s` by kernels that stream weights or cached rows.
    row_fetch: of `link_bytes_per_s` when tokens are fetched one by one, 256 bytes a head, instead of in one piece.
    """

    matmul: float
    memory: float
    row_fetch: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value <= 1:
                raise UserError(f"efficiency.{field.name}={value:g}: must be in (0, 1]")


@dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes. ffn_matrices: 2, or 3 where the FFN is gated; weights carry no biases or norms here."""

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
    def from_config(cls, name: str, shape: Mapping[str, Any]) -> ModelShape:
        """The shape behind a transformers config as a plain mapping; the FFNs of OPT and GPT-NeoX are not gated."""
        opt = shape["model_type"] == "opt"
        heads = shape["num_attention_heads"]
        tied = shape.get("tie_word_embeddings", opt)
        return cls(
            name=name,
            num_layers=shape["num_hidden_layers"],
            hidden_size=shape["hidden_size"],
            num_heads=heads,
            num_kv_heads=shape.get("num_key_value_heads", heads),
            head_dim=shape.get("head_dim", shape["hidden_size"] // heads),
            ffn_size=shape["ffn_dim" if opt else "intermediate_size"],
            ffn_matrices=2 if shape["model_type"] in ("opt", "gpt_neox") else 3,
            vocab_size=shape["vocab_size"],
            num_vocab_matrices=1 if tied else 2,
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


def load_platform(name: str) -> Platform:
    """`conf/platform/<name>.yaml`; UserError for one that is unknown, or measured instead of modelled."""
    known = {path.stem: _read(path) for path in sorted((CONF_DIR / "platform").glob("*.yaml"))}
    modelled = [stem for stem, node in known.items() if node.get("kind") == "modelled"]
    if name not in modelled:
        why = "is measured, the cost model predicts others; " if name in known else ""
        raise UserError(f"platform={name}: {why}{nearest(name, modelled)}")
    return build(Platform, known[name], "platform")


def load_shape(name: str) -> ModelShape:
    """The shape in `conf/model/<name>.yaml`; UserError for an unknown model."""
    names = sorted(path.stem for path in (CONF_DIR / "model").glob("*.yaml"))
    if name not in names:
        raise UserError(f"model={name}: {nearest(name, names)}")
    return ModelShape.from_config(name, _read(CONF_DIR / "model" / f"{name}.yaml")["shape"])


def _read(path: Path) -> dict[str, Any]:
    node = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}
