"""Statistics of hidden states: columns of Q and K before and after skewing (Fig 7), layer inputs (Table 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from harness.data.text import calibration_ids
from harness.errors import UserError
from harness.files import cache_dir
from harness.model.calibration import cached_calibration
from harness.model.prompt import PromptPass
from harness.paper.analysis.dense import Point, Subject, mean_point, observe
from methods.infinigen import InfiniGen

COLUMN_LAYERS = (0, 18)
BEFORE, AFTER = "before skewing", "after skewing"
SERIES = ("block_input_prev", "attn_out_prev", "ffn_out_prev")


def columns(subject: Subject) -> list[Point]:
    """Figure 7: magnitude of the columns of Q and K, in the model's own basis and in that of the calibrated rotation.

    A column's magnitude is the mean over tokens of its absolute values; Q's is the mean over the group's heads. The
    columns of a KV head are ordered by |q| + |k|, as InfiniGen chooses partial columns, which are the leftmost.
    """
    config, loaded, attached = subject.config, subject.loaded, subject.attached
    ids = calibration_ids(config.calibration, loaded.tokenizer)
    calibration = cached_calibration(attached, InfiniGen(), ids, loaded.fingerprint, cache_dir() / "calibration")
    layers = subject.layers(COLUMN_LAYERS)
    points: list[Point] = []

    def keep_magnitudes(layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        number = attached.numbers[layer]
        if number is None or number not in layers:
            return
        rotation = calibration["rotation"][number].to(query.device)
        own_basis = torch.eye(query.shape[-1], device=query.device).expand_as(rotation)
        for series, basis in ((BEFORE, own_basis), (AFTER, rotation)):
            pair = magnitudes(query[0], key[0], basis)
            for metric, found in zip(("query_magnitude", "key_magnitude"), pair, strict=True):
                points.extend(
                    mean_point(heads, series=series, metric=metric, x_name="column_rank", x=rank, layer=number)
                    for rank, heads in enumerate(found.unbind(-1))
                )

    positions = torch.arange(subject.num_tokens, device=attached.device)[None]
    attached.forward(subject.ids, positions, PromptPass(attached, keep=keep_magnitudes))
    return points


def magnitudes(query: Tensor, key: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Mean absolute value of each column of Q and of K in `basis`, most important column first.

    query: [heads, tokens, head_dim]; key: [num_kv_heads, tokens, head_dim]; basis: [num_kv_heads, head_dim, head_dim].
    Returns two tensors [num_kv_heads, head_dim].
    """
    stacked = query.reshape(len(key), -1, query.shape[-1])
    of_query, of_key = ((part.float() @ basis).abs().mean(1) for part in (stacked, key))
    order = (of_query + of_key).argsort(-1, descending=True)
    return of_query.gather(-1, order), of_key.gather(-1, order)


def layer_inputs(subject: Subject) -> list[Point]:
    """Table 1: cosine similarity of a layer's block input to the previous layer's block input, attention output and FFN
    output. The first is why the attention input of one layer can stand in for the next one's.

    Mean over tokens; by layer, and over layers with their standard error; layers from the second on, unless
    `analysis.layers` names some. The FFN output is the gain of the residual stream beyond the attention output, so no
    family's module names are needed.

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
    similarities = torch.stack(stream.similarities)[[layer - 1 for layer in chosen]]  # [layers, 3]
    metric, by_series = "cosine_similarity", zip(SERIES, similarities.T, strict=True)
    points = [mean_point(found, series=name, metric=metric) for name, found in by_series]
    for number, row in zip(chosen, similarities.tolist(), strict=True):
        points += [Point(name, metric, value, "layer", number, number) for name, value in zip(SERIES, row, strict=True)]
    return points


class _ResidualStream:
    """Hooks that compare each block input with the input and the outputs of the block before it.

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

    def attended(self, module: Any, args: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """An attention module has its output, which the residual stream is about to take in."""
        self.attn_out = output[0][0].float()

    def computed(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        """A submodule of the block has an output."""
        if isinstance(output, Tensor):
            self.outputs.append(output)

    def _require_ffn(self, ffn_out: Tensor) -> None:
        """UserError where no submodule's output is the FFN output: the model then adds something else to the residual
        stream, or scales or norms it first."""
        close = 1e-2 * float(ffn_out.abs().max())
        candidates = (each.float().reshape(ffn_out.shape) for each in self.outputs if each.numel() == ffn_out.numel())
        if not any(torch.allclose(each, ffn_out, atol=close) for each in candidates):
            raise UserError(
                "Table 1 needs a model whose residual stream takes in the outputs of its attention and its FFN as "
                "they are"
            )
