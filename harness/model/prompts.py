"""Dense passes over prompts, the memory that they take, and what methods measure in one."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.errors import UserError
from harness.files import replacing, text_sha256, writing_cache
from harness.model.attached import Attached
from harness.model.attention import prompt_attention
from harness.model.model_cache import ModelCache
from harness.model.passes import (
    Handler,
    Keep,
    LayerPrompt,
    PrefilledPrompt,
    alone,
    in_file,
    one_thread,
)
from methods.base import Calibration, Geometry, LayerInputs, Method

PASS_TOKENS = 2048
"""Prompt tokens that a serving engine takes in one pass (chunked prefill: 2,048 to 8,192 in vLLM
and SGLang). A session that takes over its prompt is sized for them."""


CALIBRATION_FORMAT = 4
"""Part of the cache key: raise it when the computation around `Method.calibrate`, or the file,
changes."""


class PromptPass(Handler):
    """A dense causal pass over prompts. `keep` takes what each layer makes of them.

    real: bool [batch, prompt], False for the padding on the left; None: there is none.
    needs_inputs: `keep` is given the inputs of each layer's module, too.
    """

    def __init__(
        self,
        attached: Attached,
        real: Tensor | None = None,
        keep: Keep | None = None,
        *,
        needs_inputs: bool = False,
    ) -> None:
        self.attached = attached
        self.real = real
        self.padding = () if real is None else (~real).sum(-1).tolist()
        self.keep = keep
        self.needs_inputs = needs_inputs
        self.inputs: LayerInputs | None = None

    def take_inputs(self, layer: int, inputs: LayerInputs) -> None:
        self.inputs = inputs

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        known = self.attached.layers[layer]
        if self.keep is not None:
            inputs = self.inputs if self.needs_inputs else None
            self.keep(layer, LayerPrompt(query, key, value, inputs))
        self.inputs = None  # not held beyond the layer
        softmax = self.attached.layers[layer].softmax
        return prompt_attention(query, key, value, softmax, self.padding, known.window)


def positions_of(real: Tensor) -> Tensor:
    """Positions of left-padded prompts, int [batch, prompt]; 0 in the padding."""
    return (real.cumsum(-1) - 1).clamp(min=0)


def run_prompt(attached: Attached, ids: Tensor, real: Tensor) -> PrefilledPrompt:
    """One dense pass over left-padded prompts, ids and real [batch, prompt]."""
    attached.require_even(real)
    return held_prompt(attached, ids, real, attached.new_cache())[0]


def dense_pass(
    attached: Attached,
    ids: Tensor,
    real: Tensor,
    model_cache: ModelCache,
    keep: Keep,
    *,
    needs_inputs: bool = False,
) -> Tensor:
    """Run left-padded prompts, ids and real [batch, prompt]. `keep` takes each layer as it comes.
    Returns final hidden states [batch, prompt, hidden_size]. needs_inputs: with the layers'
    inputs."""
    handler = PromptPass(attached, real, keep, needs_inputs=needs_inputs)
    return attached.forward(ids, positions_of(real), handler, model_cache, real)


def held_prompt(
    attached: Attached,
    ids: Tensor,
    real: Tensor,
    model_cache: ModelCache,
    put: Callable[[Sequence[Tensor]], list[Tensor]] = alone,
) -> tuple[PrefilledPrompt, Tensor]:
    """A prompt that has run, and the hidden states of its columns [batch, prompt, hidden_size].
    put: where each layer's tensors are kept, once it has run."""
    layers: list[LayerPrompt] = []

    def keep(_: int, prompt: LayerPrompt) -> None:
        query, key, value = put([prompt.query, prompt.key, prompt.value])
        layers.append(LayerPrompt(query, key, value))

    hidden = dense_pass(attached, ids, real, model_cache, keep)
    return PrefilledPrompt(ids, real, layers, hidden[:, -1], model_cache), hidden


def shared_prompt(
    attached: Attached, ids: Tensor, real: Tensor
) -> tuple[PrefilledPrompt, Tensor] | None:
    """As `held_prompt`, once for all runs that share it. None where runs share no prompts, or there
    is no room for this one."""
    if attached.prompts is None:
        return None

    def run() -> tuple[PrefilledPrompt, Tensor]:
        prompt, hidden = held_prompt(attached, ids, real, attached.new_cache(), in_file)
        (hidden,) = in_file([hidden])
        return replace(prompt, hidden=hidden[:, -1]), hidden

    tokens, are_real = ids.cpu().numpy().tobytes(), real.cpu().numpy().tobytes()
    key = tuple(ids.shape), tokens, are_real
    return attached.prompts.get(key, kept_bytes(attached, ids.numel()), run)


def kept_bytes(attached: Attached, num_tokens: int) -> int:
    """Bytes of all layers' queries, keys and values of so many tokens."""
    elements = 0
    for layer in attached.layers:
        elements += layer.num_heads * layer.head_dim + layer.num_kv_heads * layer.elements
    return num_tokens * elements * attached.dtype.itemsize


class PassSizes(NamedTuple):
    """Elements of the tensors of one layer in a dense pass.

    hidden: of a token's hidden state. head_dim: of its rotary tables. attention, ffn: of its
    activations. ffn_rows: an FFN takes so many rows at a time; None: all at once.
    """

    hidden: int
    head_dim: int
    attention: int
    ffn: int
    ffn_rows: int | None

    def num_elements(self, num_tokens: int) -> int:
        """An upper bound of a layer's elements in a pass over `num_tokens` tokens of all prompts.

        Per token: four hidden states, the rotary tables, and the larger of FFN and attention
        activations. An FFN that takes some rows at a time holds the activations of these.
        """
        rows = num_tokens if self.ffn_rows is None else min(num_tokens, self.ffn_rows)
        always = num_tokens * (4 * self.hidden + 4 * self.head_dim)
        return always + max(num_tokens * self.attention, rows * self.ffn)


def attention_elements(projections: int, geometry: Geometry) -> int:
    """Elements of a token's attention activations: query, key, value and output, the query once
    more, and the packed row and a copy. projections: outputs of the layer's projections."""
    return projections + geometry.head_dim * (geometry.num_heads + 4 * geometry.num_kv_heads)


def prompt_bytes(attached: Attached, num_tokens: int) -> int:
    """An upper bound of a layer's bytes in a dense pass over `num_tokens` tokens of all prompts."""
    return pass_sizes(attached).num_elements(num_tokens) * attached.dtype.itemsize


def pass_sizes(attached: Attached) -> PassSizes:
    """The sizes of a pass of a loaded model."""
    layer = attached.layers[0]
    geometry, decoder = attached.geometry, attached.decoder
    hidden = layer.call.hidden.shape[-1]
    of_attention = list(layer.module.parameters())
    projections = sum(weight.numel() for weight in of_attention if weight.dim() == 2) // hidden
    matrices, experts = [], []
    for weight in _without(layer.block.parameters(), of_attention):
        if weight.dim() == 2:
            matrices.append(weight)
        elif weight.dim() == 3:
            experts.append(weight)
    # Of a tensor of experts a token meets a few. A product of two matrices in one stays as long as
    # its halves are used.
    num_experts = getattr(decoder.stack.config, "num_experts_per_tok", None) or 1
    activations = num_experts * sum(max(weight.shape[1:]) for weight in experts)
    if matrices:
        longest_output = max(weight.shape[0] for weight in matrices)
        longest_input = max(weight.shape[1] for weight in matrices)
        activations += sum(weight.numel() for weight in matrices) // hidden
        activations += max(0, longest_output - longest_input)
    in_parts: list[Tensor] = []
    for module in decoder.row_wise:
        in_parts += module.parameters()
    is_row_wise = not _without(matrices, in_parts)
    return PassSizes(
        hidden,
        geometry.head_dim,
        attention_elements(projections, geometry),
        activations,
        decoder.rows_at_once if is_row_wise else None,
    )


def _without(weights: Iterable[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
    """The weights that are not among `others`."""
    left_out = {id(weight) for weight in others}
    return [weight for weight in weights if id(weight) not in left_out]


# Offline calibration: what a method measures of a model in one pass over a text, made once and kept
# on disk. It runs on one thread.


def calibrate(attached: Attached, method: Method, ids: Sequence[int]) -> dict[str, Tensor]:
    """The tensors that `method` measures on one sequence of token ids, by name, [num_layers, ...].

    Raises UserError where a number is not finite, as with damaged weights.
    """
    attached.require_length(len(ids))
    tokens = torch.tensor([ids], device=attached.device)
    layers: list[Calibration] = []

    def measure(layer: int, prompt: LayerPrompt) -> None:
        if attached.numbers[layer] is not None:
            query, key = prompt.query[0], prompt.key[0]
            layers.append(method.calibrate(query, key, attached.geometry, layers))

    positions = torch.arange(len(ids), device=attached.device)[None]
    with one_thread():
        attached.forward(tokens, positions, PromptPass(attached, keep=measure))
    measured = {}
    for name in layers[0]:
        tensor = torch.stack([layer[name] for layer in layers]).to(attached.device)
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise UserError(
                f"calibration: {name} of {method.title} is not finite; are the model's weights "
                "whole?"
            )
        measured[name] = tensor
    return measured


def cached_calibration(
    attached: Attached, method: Method, ids: Sequence[int], cache_dir: Path
) -> Calibration:
    """`calibrate`, or its earlier result for the same model as it is now, ids, method and settings.

    It lies in host memory: a state takes to its device what it needs.
    """
    settings = [getattr(method, name) for name in method.calibration_settings]
    module = sys.modules[type(method).__module__]
    code = [inspect.getsource(type(method).calibrate), inspect.getsource(module)]
    name = type(method).__name__
    identity = CALIBRATION_FORMAT, attached.decoder.digest, list(ids), name, settings, code
    path = cache_dir / f"{text_sha256(repr(identity))[:32]}.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError):  # not there, or damaged
        measured = calibrate(attached, method, ids)
    found = {name: tensor.cpu().contiguous() for name, tensor in measured.items()}
    with writing_cache(), replacing(path) as scratch:
        save_file(found, scratch)
    return found
