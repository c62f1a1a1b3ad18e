"""The layers of a decoder, read from the loaded model itself: no code here knows a model family by
its name.

The model runs two tokens once. The arguments of its calls to transformers' attention function tell
the number of heads, the softmax, and the tokens that each layer sees. The arguments of its calls to
the cache tell how a token is stored. `harness.model.attach` compares the result with the model's
own logits before anything runs.

    decoder = read_decoder(model)
    decoder.layers[3].window, decoder.layers[3].softmax, decoder.recurrent
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from harness.model.calls import (
    Call,
    Reached,
    attention_function,
    refusal,
    reraise_out_of_memory,
    stack_of,
    stop,
)
from harness.model.model_cache import ModelCache
from harness.model.trace import Latent, Layer, Trace

ROWS_AT_ONCE = 2048
"""Rows of a prompt that a feed-forward network takes at once, so that what it makes on the way does
not grow with the prompt."""
_decoders: WeakKeyDictionary[Any, Decoder] = WeakKeyDictionary()


def read_decoder(model: Any) -> Decoder:
    """The decoder of a loaded model, read once. Raises UserError for a model that does not compute
    attention through transformers' attention interface."""
    if model not in _decoders:
        _decoders[model] = Decoder(model)
    return _decoders[model]


class Decoder:
    """A loaded model's layers. It does not keep the model alive.

    family: transformers' name of it. stack: the module that turns token ids into final hidden
    states. layers: its attention layers, in order. blocks: its decoder layers. recurrent: modules
    that keep a state of the sequence instead of keys and values. output_type: the type that the
    stack returns. row_wise: modules of the blocks, feed-forward networks, that compute each row by
    itself; rows_at_once: how many they take.

    is_checked: whether its logits were compared with the model's own. takes_rows: whether recurrent
    modules take several rows at once after a state. no_rehearsal, no_padding: why the model takes
    no rehearsal, or no batch with padding; None where it does.
    """

    def __init__(self, model: Any) -> None:
        self.family: str = model.config.model_type
        self.stack: Any = stack_of(model)
        self.is_checked = False
        self.takes_rows = True
        self.no_rehearsal: str | None = None
        self.no_padding: str | None = None
        with torch.no_grad():
            trace = Trace(self.stack, self.family)
            self.layers: list[Layer] = trace.run()
            self.recurrent: list[nn.Module] = trace.recurrent
            self.output_type = trace.output_type
            self.blocks = self._find_blocks()
            self.row_wise = self._find_row_wise()
            self.rows_at_once = ROWS_AT_ONCE
            with attention_function(self.stack, stop):
                for layer in self.layers:
                    self._find_unused(layer)
                    layer.latent = self._read_latent(layer, trace.stored.get(id(layer.module)))
        for layer in self.layers:
            if layer.latent is not None:
                layer.num_kv_heads, layer.head_dim, layer.value_dim = (
                    1,
                    layer.latent.to_query.shape[2],
                    layer.latent.rank,
                )

    def _find_row_wise(self) -> list[nn.Module]:
        """The blocks' children with several matrices that hold neither attention nor a recurrent
        module."""
        mixers = {id(layer.module) for layer in self.layers} | {
            id(module) for module in self.recurrent
        }
        children = [child for block in self.blocks for child in block.children()]
        return [
            child
            for child in children
            if sum(weight.dim() > 1 for weight in child.parameters()) > 1
            and not mixers & {id(module) for module in child.modules()}
        ]

    def expand_latents(self) -> None:
        """Store keys and values of every head, where latents do not give the model's own
        numbers."""
        for layer in self.layers:
            if layer.latent is not None:
                to_query, to_value = layer.latent
                layer.num_kv_heads, layer.head_dim = to_query.shape[:2]
                layer.value_dim, layer.latent = to_value.shape[2], None

    def run_to_attention(self, layer: Layer, call: Call) -> Reached:
        """Run an attention module up to the attention function, which is `stop` or raises `Reached`
        as well."""
        try:
            layer.module.forward(*call.args, **call.kwargs)
        except Reached as reached:
            return reached
        raise AssertionError("an attention module calls the attention function")

    def query_parameters(self, layer: Layer) -> list[nn.Parameter]:
        """The weights that make a layer's query; a rehearsal reads them while the previous layer
        computes."""
        return [
            each
            for name in layer.query_modules
            for each in layer.module.get_submodule(name).parameters()
        ]

    def _find_blocks(self) -> list[nn.Module]:
        """The list of modules that holds all attention modules. Sets `block` and `before` of each
        attention layer.

        The mixer of a block is its attention module, else a child with a layer index.
        """
        attentions = {id(layer.module): layer for layer in self.layers}
        for blocks in self.stack.modules():
            if not isinstance(blocks, nn.ModuleList):
                continue
            if not attentions.keys() <= {
                id(inner) for block in blocks for inner in block.modules()
            }:
                continue
            previous: nn.Module | None = None
            for block in blocks:
                inside = [
                    attentions[id(each)] for each in block.modules() if id(each) in attentions
                ]
                for layer in inside:
                    layer.block, layer.before = block, previous
                    previous = layer.module
                if not inside:
                    previous = next(
                        (each for each in block.children() if hasattr(each, "layer_idx")), previous
                    )
            return list(blocks)
        raise refusal(self.family, "its layers are in no list")

    def _find_unused(self, layer: Layer) -> None:
        """Find the submodules that the query does not depend on by autograd's graph; a rehearsal
        leaves them out."""
        outputs: dict[str, Tensor] = {}
        names = {
            each: name
            for name, each in layer.module.named_modules()
            if name and not list(each.children())
        }

        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, Tensor):
                outputs[names[module]] = output

        with ExitStack() as hooks, torch.enable_grad():
            for module in names:
                hooks.callback(module.register_forward_hook(note).remove)
            hidden = layer.call.hidden.clone().requires_grad_()
            call = layer.call.with_hidden(hidden, past_key_values=ModelCache(self.stack.config))
            query = self.run_to_attention(layer, call).query
        ancestors: set[Any] = {None}  # None: made of nothing that autograd follows
        todo: list[Any] = [query.grad_fn]
        while todo:
            node = todo.pop()
            if node not in ancestors:
                ancestors.add(node)
                todo += [before for before, _ in node.next_functions]
        unused = {
            name
            for name, each in outputs.items()
            if query.requires_grad and each.grad_fn not in ancestors
        }
        layer.unused = {name: each.shape[-1] for name, each in outputs.items() if name in unused}
        layer.query_modules = tuple(name for name in outputs if name not in unused)

    def _read_latent(self, layer: Layer, cached: tuple[Tensor, Tensor] | None) -> Latent | None:
        """The matrices that turn a stored latent into every head's key and value: the output of the
        module's own code for unit latents. None where the module stores the keys and values that it
        attends to."""
        if (
            cached is None
            or cached[0].shape[1] == layer.num_kv_heads
            or any(each.shape[1] != 1 for each in cached)
        ):
            return None
        rank, rotary = (
            torch.eye(each.shape[-1], dtype=each.dtype, device=each.device)[None, None]
            for each in cached
        )

        def expanded(latents: Tensor, rotaries: Tensor) -> Reached:
            cache = ModelCache(self.stack.config)
            cache.instead = latents, rotaries
            return self.run_to_attention(
                layer, layer.call.with_hidden(layer.call.hidden, past_key_values=cache)
            )

        try:
            of_rank = expanded(rank, rank.new_zeros(1, 1, rank.shape[2], rotary.shape[2]))
            of_rotary = expanded(rotary.new_zeros(1, 1, rotary.shape[2], rank.shape[2]), rotary)
        except (
            RuntimeError
        ) as error:  # its code takes no other number of tokens than that of its queries
            reraise_out_of_memory(error)
            return None
        to_query = torch.cat(
            [of_rank.key[0], of_rotary.key[0]], 1
        ).mT  # [heads, head_dim, rank + rotary]
        return Latent(to_query.contiguous(), of_rank.value[0].contiguous())
