"""Put our attention under a loaded Hugging Face decoder, and take it away again.

`attach(model)` registers an attention function, hooks the input of every attention module, and undoes all of it on
exit. While attached, a forward pass hands each layer's fresh query, key and value to a *handler*, which owns the
history; the model itself keeps no cache and is given explicit positions. No mask function is registered: validity,
causality and selection are the handler's, and transformers then skips its own mask code, which looks at the positions
of every step and so would synchronise with the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from harness.errors import UserError
from harness.model.adapters import Adapter, adapter_for
from methods.base import Geometry

_names = (f"kv_harness_{number}" for number in count())


class Handler:
    """Who computes attention during a forward pass. Only `attention` must be given."""

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of a layer's fresh rows.

        query: [batch, heads, rows, head_dim], post-position, before the softmax scale; key, value: [batch,
        num_kv_heads, rows, head_dim]. Returns [batch, rows, heads, head_dim].
        """
        raise NotImplementedError

    def rehearses(self, layer: int) -> bool:
        """Whether the query of `layer` is wanted early."""
        return False

    def rehearse(self, layer: int, query: Tensor) -> None:
        """The query `layer` would have, made from the attention input of the layer before; called there."""

    def layer_begins(self, layer: int) -> None:
        """A layer's attention module has its input."""

    def layer_ends(self, layer: int) -> None:
        """A layer's attention module is done."""


class Attached:
    """A model with our attention under it. Valid inside `attach`."""

    def __init__(self, model: Any, adapter: Adapter) -> None:
        self.model = model
        self.adapter = adapter
        self.geometry: Geometry = adapter.geometry(model)
        self.attentions: list[nn.Module] = [adapter.attention(layer) for layer in adapter.layers(model)]
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self._handler: Handler | None = None

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, handler: Handler) -> Tensor:
        """Final hidden states [batch, rows, hidden_size] of `ids` [batch, rows] at `positions`.

        UserError where activations overflow in float16. A pass over one row is not looked at: a decode step waits for
        no device, and the pass over its prompt was.
        """
        self._handler = handler
        try:
            output = self.model.get_decoder()(input_ids=ids, position_ids=positions, use_cache=False)
        finally:
            self._handler = None
        if self.dtype == torch.float16 and ids.shape[1] > 1:
            require_in_range(output.last_hidden_state)
        return output.last_hidden_state

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Output head over hidden states [..., hidden_size]: fp32 [..., vocab]."""
        return self.model.get_output_embeddings()(hidden).float()

    def require_window(self, num_tokens: int) -> None:
        """UserError where the model's sliding window is shorter than the sequence: its layers would see less.

        Likewise where its rotary frequencies follow the length of the sequence (longrope): rows cached before would
        have been placed otherwise.
        """
        config = self.model.config
        rope = getattr(config, "rope_parameters", None) or {}
        limits = {}
        if rope.get("rope_type") == "longrope":
            limits["length up to which longrope keeps its positions"] = rope.get("original_max_position_embeddings")
        if getattr(config, "use_sliding_window", True):
            limits["sliding window"] = getattr(config, "sliding_window", None)
        for name, limit in limits.items():
            if limit and num_tokens > limit:
                raise UserError(
                    f"a sequence of {num_tokens} tokens: {limit} is the model's {name}; lower seq_len, or prompt_len, "
                    "gen_len or max_new_tokens"
                )

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        if self._handler is None:
            raise RuntimeError("the model is attached: run it through Attached.forward")
        if self.adapter.prescaled:
            query = query / self.geometry.scale
        return self._handler.attention(module.layer_idx, query, key, value), None

    def _before(self, module: Any, args: tuple[Any, ...], call: Mapping[str, Any]) -> None:
        if self._handler is None:
            return
        self._handler.layer_begins(module.layer_idx)
        following = module.layer_idx + 1
        if following < len(self.attentions) and self._handler.rehearses(following):
            hidden = args[0] if args else call["hidden_states"]
            query = self.adapter.query(self.attentions[following], hidden, call)
            self._handler.rehearse(following, query)

    def _after(self, module: Any, *_: Any) -> None:
        if self._handler is not None:
            self._handler.layer_ends(module.layer_idx)


def require_in_range(hidden: Tensor) -> None:
    """Raise UserError where float16's range, which no other format falls short of, did not hold activations."""
    if not hidden.sum(dtype=torch.float32).isfinite():
        raise UserError(
            "model.dtype=float16: the model's activations overflow in it (beyond 65504); choose bfloat16 or float32"
        )


@contextmanager
def attach(model: Any) -> Iterator[Attached]:
    """Run `model` (eval mode) through our attention inside the `with` block.

    Raises UserError for an unsupported family.
    """
    attached = Attached(model, adapter_for(model))
    name = next(_names)
    before = model.config._attn_implementation
    hooks = []
    try:
        AttentionInterface.register(name, attached._attend)
        for module in attached.attentions:
            hooks.append(module.register_forward_pre_hook(attached._before, with_kwargs=True))
            hooks.append(module.register_forward_hook(attached._after))
        model.set_attn_implementation(name)
        yield attached
    finally:
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(name, None)
