"""The layers of a decoder, read from the loaded model itself, and runs of a layer's parts.

`harness.model.trace` runs two tokens through the model. Here the layers get what follows from
running their modules again: which submodules make a query, and how latents become keys and values.
`harness.model.attach` compares the result with the model's own logits before anything runs.

    decoder = Decoder(model)
    decoder.layers[3].window, decoder.layers[3].softmax, decoder.recurrent
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harness.model.calls import (
    Call,
    Reached,
    attention_function,
    first_tensor,
    refusal,
    reraise_out_of_memory,
    stack_of,
    stop,
    tolerance,
)
from harness.model.model_cache import ModelCache
from harness.model.trace import FAR, DirectQuery, Latent, Layer, Trace

ROWS_AT_ONCE = 2048
"""Rows of a prompt that a feed-forward network takes at once, so that what it makes on the way does
not grow with the prompt."""


class Decoder:
    """A loaded model's layers, with the weights that it has now. It does not keep the model alive.
    Raises UserError for a model that does not compute attention through transformers' attention
    interface.

    family: transformers' name of it. stack: the module that turns token ids into final hidden
    states. layers: its attention layers, in order. blocks: its decoder layers. recurrent: modules
    that keep a state of the sequence instead of keys and values. output_type: the type that the
    stack returns. row_wise: modules of the blocks, feed-forward networks, that compute each row by
    itself; rows_at_once: how many they take.

    digest: of the model (`harness.model.attach`), once it is checked. takes_rows: whether recurrent
    modules take several rows at once after a state. no_prediction, no_padding: why the model takes
    no prediction, or no batch with padding; None where it does.
    """

    def __init__(self, model: Any) -> None:
        self.family: str = model.config.model_type
        self.stack: Any = stack_of(model)
        self.digest = ""
        self.takes_rows = True
        self.no_prediction: str | None = None
        self.no_padding: str | None = None
        self.rows_at_once = ROWS_AT_ONCE
        with torch.no_grad():
            trace = Trace(self.stack, self.family)
            self.layers: list[Layer] = trace.run()
            self.recurrent: list[nn.Module] = trace.recurrent
            self.output_type = trace.output_type
            self.blocks = self._find_blocks()
            self.row_wise = self._find_row_wise()
            with attention_function(self.stack, stop):
                for layer in self.layers:
                    self._find_unused(layer)
                    layer.direct = self._find_direct(layer)
                    layer.latent = self._read_latent(layer, trace.stored.get(id(layer.module)))
        for layer in self.layers:
            if layer.latent is not None:
                layer.num_kv_heads = 1
                layer.head_dim = layer.latent.to_query.shape[2]
                layer.value_dim = layer.latent.rank

    def run_to_attention(self, layer: Layer, call: Call) -> Reached:
        """Run an attention module up to the attention function, which raises `Reached`."""
        try:
            layer.module.forward(*call.args, **call.kwargs)
        except Reached as reached:
            return reached
        raise AssertionError("an attention module calls the attention function")

    def query_parameters(self, layer: Layer) -> list[nn.Parameter]:
        """The weights that make a query, which a prediction reads during the previous layer."""
        parameters: list[nn.Parameter] = []
        for name in layer.query_modules:
            parameters += layer.module.get_submodule(name).parameters()
        return parameters

    # Reading

    def _find_blocks(self) -> list[nn.Module]:
        """The list of modules that holds all attention modules.

        Sets `block` and `before` of each attention layer. The mixer of a block is its attention
        module, else a child with a layer index.
        """
        attentions = {id(layer.module): layer for layer in self.layers}
        for blocks in self.stack.modules():
            if not isinstance(blocks, nn.ModuleList):
                continue
            held = {id(inner) for inner in blocks.modules()}
            if not attentions.keys() <= held:
                continue
            previous: nn.Module | None = None
            for block in blocks:
                inside = [id(inner) for inner in block.modules() if id(inner) in attentions]
                for attention in inside:
                    layer = attentions[attention]
                    layer.block = block
                    layer.before = previous
                    previous = layer.module
                if not inside:
                    indexed = [child for child in block.children() if hasattr(child, "layer_idx")]
                    previous = indexed[0] if indexed else previous
            return list(blocks)
        raise refusal(self.family, "its layers are in no list")

    def _find_row_wise(self) -> list[nn.Module]:
        """The blocks' children with several matrices, but no attention or recurrent module."""
        mixers = {layer.module for layer in self.layers} | set(self.recurrent)
        found = []
        for block in self.blocks:
            for child in block.children():
                num_matrices = sum(weight.dim() > 1 for weight in child.parameters())
                if num_matrices > 1 and mixers.isdisjoint(child.modules()):
                    found.append(child)
        return found

    def _find_unused(self, layer: Layer) -> None:
        """Find the submodules without which the query is the same; a prediction leaves them out."""
        leaves: dict[str, nn.Module] = {}
        for name, module in layer.module.named_modules():
            if name and not list(module.children()):
                leaves[name] = module
        sizes: dict[str, int] = {}

        def note(name: str, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, Tensor):
                sizes[name] = output.shape[-1]

        def zeros(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            return torch.zeros_like(output)

        def query() -> Tensor:
            call = layer.rerun(layer.call.hidden, ModelCache(self.stack.config))
            return self.run_to_attention(layer, call).query

        with ExitStack() as hooks:
            for name, module in leaves.items():
                hooks.enter_context(module.register_forward_hook(partial(note, name)))
            whole = query()
        for name, size in sizes.items():
            with leaves[name].register_forward_hook(zeros):
                if torch.equal(query(), whole):
                    layer.unused[name] = size
        layer.query_modules = tuple(name for name in sizes if name not in layer.unused)

    def _find_direct(self, layer: Layer) -> DirectQuery | None:
        """A way to the query without the module's own code, where one is the same to the bit: of
        large numbers at far positions, and of small ones at near ones."""
        modules = tuple(map(layer.module.get_submodule, layer.query_modules))
        last = getattr(self.stack.config, "max_position_embeddings", None) or FAR
        generator = torch.Generator().manual_seed(0)
        like = layer.call.hidden
        given = []
        for first, size in ((min(FAR, last) - like.shape[1], 100.0), (1, 1.0)):
            hidden = size * torch.randn(like.shape, generator=generator).to(like)
            positions = torch.arange(first, first + like.shape[1], device=like.device)[None]
            embeddings = None
            if layer.positions is not None:
                embeddings = layer.positions.embeddings(hidden, positions)
            cache = ModelCache(self.stack.config)
            cache.num_columns = first
            known = {"position_embeddings": embeddings, "position_ids": positions}
            try:
                query = self.run_to_attention(layer, layer.rerun(hidden, cache, **known)).query
            except RuntimeError as error:  # its code takes no other rows than those of its own pass
                reraise_out_of_memory(error)
                return None
            given.append((hidden, embeddings, query))
        num_heads, head_dim = query.shape[1], query.shape[3]
        scale = layer.softmax.scale if layer.prescales else 1.0

        def is_same(direct: DirectQuery) -> bool:
            try:
                return all(
                    torch.equal(direct.query(hidden, embeddings) * scale, query)
                    for hidden, embeddings, query in given
                )
            except (RuntimeError, TypeError, ValueError, AttributeError) as error:
                reraise_out_of_memory(error)
                return False

        for num_whole in range(1, len(modules) + 1):
            for is_turned in (layer.positions is not None, False):
                direct = DirectQuery(modules, num_whole, num_heads, head_dim, is_turned)
                if is_same(direct):
                    return direct
        return None

    def _read_latent(self, layer: Layer, cached: tuple[Tensor, Tensor] | None) -> Latent | None:
        """The matrices that turn a stored latent into every head's key and value: the output of the
        module's own code for unit latents. None where the module stores the keys and values that it
        attends to."""
        if cached is None or layer.num_kv_heads == 1 or any(each.shape[1] > 1 for each in cached):
            return None
        latents, rotaries = (_unit_rows(stored) for stored in cached)
        num_latents, num_rotaries = latents.shape[2], rotaries.shape[2]

        def expanded(latents: Tensor, rotaries: Tensor) -> Reached:
            cache = ModelCache(self.stack.config)
            cache.instead = latents, rotaries
            return self.run_to_attention(layer, layer.rerun(layer.call.hidden, cache))

        of_latents = expanded(latents, latents.new_zeros(1, 1, num_latents, num_rotaries))
        of_rotaries = expanded(rotaries.new_zeros(1, 1, num_rotaries, num_latents), rotaries)
        keys = torch.cat([of_latents.key[0], of_rotaries.key[0]], 1)
        to_query = keys.mT.contiguous()  # [heads, head_dim, rank + rotary]
        return Latent(to_query, of_latents.value[0].contiguous())


def _unit_rows(stored: Tensor) -> Tensor:
    """A unit vector for each element of a stored token, [1, 1, size, size]."""
    size = stored.shape[-1]
    return torch.eye(size, dtype=stored.dtype, device=stored.device)[None, None]


# The output projection by query head, found by running the layer's code


def output_factor(decoder: Decoder, layer: Layer) -> Tensor:
    """Matrices R, fp32 [heads, value_dim, value_dim], with |R v| = |W_O v| for what a head's part
    of the layer's output projection makes of a value v.

    Made once for a layer. Raises UserError as `output_matrix`.
    """
    if layer.output_factor is None:
        matrix = output_matrix(decoder, layer)
        layer.output_factor = torch.linalg.qr(matrix.mT).R
    return layer.output_factor


def output_matrix(decoder: Decoder, layer: Layer) -> Tensor:
    """The output projection by query head, fp32 [heads, value_dim, hidden_size]: for a value v a
    head adds v @ matrix[head] to the layer's output. That of latent values takes the latent.

    The projection is found by the module's own code: it is given unit vectors for the output of its
    attention. It is made anew in each call, since the matrices of all layers in fp32 may be larger
    than a prompt's cache. Raises UserError where the module does not multiply that by a matrix
    alone, as one with an output gate.
    """
    heads = layer.num_heads
    value_dim = layer.value_dim if layer.latent is None else layer.latent.to_value.shape[2]
    size, like = heads * value_dim, layer.call.hidden
    # Any numbers do, if they are made where the layer computes.
    places = torch.arange(like.numel(), dtype=torch.float32, device=like.device)
    inputs = places.sin().view(like.shape).to(like)
    unit = torch.eye(size, dtype=like.dtype, device=like.device)
    any_row = torch.arange(size, dtype=torch.float32, device=like.device).cos()[None].to(like)
    given = torch.cat([torch.zeros_like(any_row), any_row, unit])
    attended = given.view(-1, 1, heads, value_dim).expand(-1, like.shape[1], -1, -1)

    def output(part: Tensor) -> Tensor:
        """What the module makes of `part` [n, rows, heads, value_dim]: [n, rows, hidden_size]."""
        cache = ModelCache(decoder.stack.config)
        call = layer.rerun(inputs.repeat(len(part), 1, 1), cache)
        with attention_function(decoder.stack, lambda *_, **__: (part.contiguous(), None)):
            made = first_tensor(layer.module.forward(*call.args, **call.kwargs))
        assert made is not None
        return made.float()

    try:
        nothing, of_any, *units = torch.cat([output(part) for part in attended.split(256)])
    except RuntimeError as error:
        reraise_out_of_memory(error)
        why = "its output projection cannot be run alone, which this method needs"
        raise refusal(decoder.family, why) from error
    by_row = torch.stack(units) - nothing  # [size, rows, hidden_size]
    matrix = by_row[:, 0]
    if not layer.is_output_plain:
        _require_plain(decoder, any_row.float() @ matrix, of_any - nothing, tolerance(like.dtype))
        layer.is_output_plain = True
    matrix = matrix.view(heads, value_dim, -1)
    return matrix if layer.latent is None else layer.latent.to_value.float() @ matrix


def _require_plain(decoder: Decoder, expected: Tensor, got: Tensor, largest: float) -> None:
    """Raises UserError where an output `got` [rows, hidden_size] of a layer is not `expected`
    [1, hidden_size], what its projection alone gives. Waits for the device."""
    close = largest * float(expected.abs().max())
    if not torch.allclose(got, expected.expand_as(got), atol=close):
        raise refusal(
            decoder.family,
            "its attention's output passes more than a projection, such as a gate, of which this "
            "method does not know",
        )
