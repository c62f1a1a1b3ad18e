"""What differs between model families: where the attention input is turned into a query, and how queries are scaled.

A family is one small class here. It needs the attention modules (with `layer_idx`), a rehearsed query from another
layer's attention input, and whether the attention function receives queries that are scaled already.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor
from torch.nn.functional import linear

from harness.errors import UserError
from methods.base import Geometry


class Adapter:
    """Llama-like families: separate q_proj, optional q_norm, rotary positions given to every layer."""

    prescaled = False
    """The model multiplies the query by the softmax scale before the attention function sees it."""

    def layers(self, model: Any) -> list[Any]:
        """The decoder layers, in order."""
        return list(model.get_decoder().layers)

    def attention(self, layer: Any) -> Any:
        """A decoder layer's attention module, whose first argument is the attention input (after the norm)."""
        return layer.self_attn

    def query(self, attention: Any, hidden: Tensor, call: Mapping[str, Any]) -> Tensor:
        """The query that `attention` would make of `hidden` [batch, rows, hidden_size].

        call: keyword arguments of the attention call that `hidden` was made for, positions among them.
        Returns [batch, heads, rows, head_dim], post-position and before the softmax scale.
        """
        return _rotated(attention, self.projected(attention, hidden), *call["position_embeddings"])

    def rotate(self, model: Any, states: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
        """Queries or keys [batch, heads, n, head_dim] at `positions` int [batch, n]; `inverse` takes positions off."""
        cos, sin = model.get_decoder().rotary_emb(states, positions)
        if inverse:
            power = cos.square() + sin.square()  # 1, but where a long-context variant scales both
            cos, sin = cos / power, -sin / power
        return _rotated(self.attention(self.layers(model)[0]), states, cos, sin)

    def projected(self, attention: Any, hidden: Tensor) -> Tensor:
        """The query before its position is applied, [batch, heads, rows, head_dim]."""
        query = attention.q_proj(hidden).view(*hidden.shape[:-1], -1, attention.head_dim)
        if hasattr(attention, "q_norm"):
            query = attention.q_norm(query)
        return query.transpose(1, 2)

    def query_weight(self, attention: Any) -> Tensor:
        """The matrix behind `query`: read while the layer before computes."""
        return attention.q_proj.weight

    def head_dim(self, attention: Any) -> int:
        """Elements of a head."""
        return attention.head_dim

    def geometry(self, model: Any) -> Geometry:
        """The shape a method sees; `scale` is the softmax scale of the first attention module."""
        config = model.config
        attention = self.attention(self.layers(model)[0])
        heads = config.num_attention_heads
        return Geometry(
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=self.head_dim(attention),
            scale=attention.scaling,
            family=config.model_type,
            rotate=partial(self.rotate, model),
        )


class OPTAdapter(Adapter):
    """OPT: learned positions, biases, and a query that is scaled before the attention function."""

    prescaled = True

    def query(self, attention: Any, hidden: Tensor, call: Mapping[str, Any]) -> Tensor:
        """Positions are in `hidden` already."""
        return self.projected(attention, hidden)

    def rotate(self, model: Any, states: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
        """Nor do keys have positions of their own."""
        return states


class Phi3Adapter(Adapter):
    """Phi-3: query, key and value are one projection, the queries of all heads first."""

    def projected(self, attention: Any, hidden: Tensor) -> Tensor:
        """The rows of the projection that make queries."""
        weight = self.query_weight(attention)[: attention.config.num_attention_heads * attention.head_dim]
        return linear(hidden, weight).view(*hidden.shape[:-1], -1, attention.head_dim).transpose(1, 2)

    def query_weight(self, attention: Any) -> Tensor:
        """Shared with keys and values."""
        return attention.qkv_proj.weight


class GPTNeoXAdapter(Adapter):
    """GPT-NeoX: query, key and value are one projection, head by head; a part of each head is rotary."""

    def attention(self, layer: Any) -> Any:
        """Called otherwise."""
        return layer.attention

    def head_dim(self, attention: Any) -> int:
        """Called otherwise."""
        return attention.head_size

    def projected(self, attention: Any, hidden: Tensor) -> Tensor:
        """A product a head: the queries' weights lie apart, and together they would be a copy."""
        fused, size = attention.query_key_value, attention.head_size
        weight = fused.weight.view(-1, 3, size, fused.in_features)[:, 0]  # [heads, head_dim, hidden_size]
        query = hidden.flatten(0, 1) @ weight.mT  # [heads, batch * rows, head_dim]
        if fused.bias is not None:
            query = query + fused.bias.view(-1, 3, 1, size)[:, 0]
        return query.unflatten(1, hidden.shape[:2]).transpose(0, 1)

    def query_weight(self, attention: Any) -> Tensor:
        """Shared with keys and values."""
        return attention.query_key_value.weight


ADAPTERS: dict[str, Adapter] = {
    "llama": Adapter(),
    "mistral": Adapter(),
    "qwen2": Adapter(),
    "qwen3": Adapter(),
    "opt": OPTAdapter(),
    "phi3": Phi3Adapter(),
    "gpt_neox": GPTNeoXAdapter(),
}
SUPPORTED_FAMILIES = tuple(ADAPTERS)


def _rotated(attention: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The family's own rotary embedding, which may leave a part of each head as it is."""
    rotate = import_module(type(attention).__module__).apply_rotary_pos_emb
    return rotate(states, states[:, :1], cos, sin)[0]


def adapter_for(model: Any) -> Adapter:
    """The adapter of a loaded model; UserError for a family without one."""
    family = model.config.model_type
    if family not in ADAPTERS:
        raise UserError(f"model family {family!r} is not supported; supported: {', '.join(SUPPORTED_FAMILIES)}")
    return ADAPTERS[family]
