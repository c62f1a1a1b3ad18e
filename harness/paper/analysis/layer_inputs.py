"""Table 1: cosine similarity of a layer's block input to the previous layer's block input, attention output and FFN
output. The first is why the attention input of one layer can stand in for the next one's.

Mean over tokens; by layer, and over layers with their standard error. The FFN output is what the residual stream
gained beyond the attention output, so no family's module names are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from harness.errors import UserError
from harness.paper.analysis.dense import observe
from harness.paper.analysis.points import Point, mean_point
from harness.paper.analysis.subject import Subject

SERIES = ("block_input_prev", "attn_out_prev", "ffn_out_prev")


def measure(subject: Subject) -> list[Point]:
    """The similarities of all layers from the second on, unless `analysis.layers` names some.

    Raises UserError for layer 0, which has none before it, and for a model that norms after the residual sum.
    """
    model, decoder = subject.loaded.model, subject.attached.decoder
    if not getattr(model.config, "do_layer_norm_before", True):
        name = subject.loaded.name
        raise UserError(f"model {name}: norms after the residual sum; Table 1 needs a model that norms before it")
    num_layers = len(decoder.layers)
    if len(decoder.blocks) != num_layers:
        raise UserError(f"model {subject.loaded.name}: Table 1 needs a model of which every layer attends, once")
    chosen = subject.layers(()) or tuple(range(1, num_layers))
    if 0 in chosen:
        raise UserError("analysis.layers: layer 0 has no layer before it; name layers from 1 on")
    stream = _ResidualStream()
    hooks = []
    try:
        for layer in decoder.layers:
            hooks.append(layer.block.register_forward_pre_hook(stream.enter, with_kwargs=True))
            hooks.append(layer.module.register_forward_hook(stream.attended))
            hooks += [each.register_forward_hook(stream.computed) for each in layer.block.modules()]
        observe(subject.attached, subject.ids, {})
    finally:
        for hook in hooks:
            hook.remove()
    return _points(torch.stack(stream.similarities)[[layer - 1 for layer in chosen]], chosen)


class _ResidualStream:
    """Hooks that compare each block input with what the block before it took in and gave out.

    similarities: for each layer from the second on, fp32 [3] in the order of `SERIES`. outputs: of the submodules of
    the block under way.
    """

    def __init__(self) -> None:
        self.similarities: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.block_input: Tensor | None = None  # [tokens, hidden_size]
        self.attn_out: Tensor | None = None

    def enter(self, module: Any, args: tuple[Any, ...], call: Mapping[str, Any]) -> None:
        """A decoder layer has its input."""
        hidden = (args[0] if args else call["hidden_states"])[0].float()
        before, attn_out = self.block_input, self.attn_out
        if before is not None and attn_out is not None:
            ffn_out = hidden - before - attn_out
            self._require_ffn(ffn_out)
            earlier = (before, attn_out, ffn_out)
            cosines = [torch.cosine_similarity(hidden, other, dim=-1).mean() for other in earlier]
            self.similarities.append(torch.stack(cosines).cpu())
        self.block_input = hidden
        self.outputs.clear()

    def computed(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        """A submodule of the block has an output."""
        if isinstance(output, Tensor):
            self.outputs.append(output)

    def _require_ffn(self, ffn_out: Tensor) -> None:
        """Raise UserError where what the residual stream gained beside the attention is no submodule's output: the
        model then adds something else of either, scaled or normed."""
        close = 1e-2 * float(ffn_out.abs().max())
        candidates = (each.float().reshape(ffn_out.shape) for each in self.outputs if each.numel() == ffn_out.numel())
        if not any(torch.allclose(each, ffn_out, atol=close) for each in candidates):
            raise UserError(
                "Table 1 needs a model whose residual stream takes in the outputs of its attention and its FFN as "
                "they are"
            )

    def attended(self, module: Any, args: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Its attention module has an output, which the residual stream is about to take in."""
        self.attn_out = output[0][0].float()


def _points(similarities: Tensor, layers: tuple[int, ...]) -> list[Point]:
    """similarities: [layers, 3]."""
    metric = "cosine_similarity"
    columns = zip(SERIES, similarities.T, strict=True)
    points = [mean_point(column, series=name, metric=metric) for name, column in columns]
    for layer, row in zip(layers, similarities.tolist(), strict=True):
        points += [Point(name, metric, value, "layer", layer, layer) for name, value in zip(SERIES, row, strict=True)]
    return points
