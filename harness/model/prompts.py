"""Dense passes over prompts, and the memory that they take."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from harness.model.attached import Attached, Handler
from harness.model.attention import prompt_attention
from harness.model.dense_prompts import PrefilledPrompt
from harness.model.model_cache import ModelCache
from methods.base import LayerInputs

Keep = Callable[..., None]
"""Takes a layer, and its query, key and value [batch, heads, prompt, size]; behind them its
`LayerInputs` where the pass was asked for them."""


class PromptPass(Handler):
    """A dense causal pass over prompts. `keep` is given every layer's number, query, key and value
    as they come.

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
        self.padding = () if real is None else (~real).sum(-1).tolist()
        self.keep = keep
        self.needs_inputs = needs_inputs
        self.inputs: LayerInputs | None = None

    def take_inputs(self, layer: int, inputs: LayerInputs) -> None:
        self.inputs = inputs

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.keep is not None:
            inputs = (self.inputs,) if self.needs_inputs else ()
            self.keep(layer, query, key, value, *inputs)
            self.inputs = None  # not held beyond the layer
        softmax, window = self.attached.softmaxes[layer], self.attached.layers[layer].window
        return prompt_attention(query, key, value, softmax, self.padding, window)


def positions_of(real: Tensor) -> Tensor:
    """Positions of left-padded prompts, int [batch, prompt]; 0 in the padding."""
    return (real.cumsum(-1) - 1).clamp(min=0)


def run_prompt(attached: Attached, ids: Tensor, real: Tensor) -> PrefilledPrompt:
    """One dense pass over left-padded prompts, ids and real [batch, prompt]."""
    attached.require_even(real)
    return held_prompt(attached, ids, real, attached.new_cache())[0]


def held_prompt(
    attached: Attached, ids: Tensor, real: Tensor, model_cache: ModelCache
) -> tuple[PrefilledPrompt, Tensor]:
    """A prompt that has run, and the final hidden states of all its columns [batch, prompt,
    hidden_size]."""
    layers: list[tuple[Tensor, Tensor, Tensor]] = []

    def alone(states: Tensor) -> Tensor:
        """Copied where it is a part of a larger tensor, a fused projection, that would be kept with
        it."""
        return states.clone() if states.untyped_storage().nbytes() > states.nbytes else states

    def keep(_: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        layers.append((alone(query), alone(key), alone(value)))

    hidden = attached.forward(
        ids, positions_of(real), PromptPass(attached, real, keep), model_cache, real
    )
    return PrefilledPrompt(ids, real, layers, hidden[:, -1], model_cache), hidden


def prompt_bytes(attached: Attached, num_tokens: int) -> int:
    """An upper bound of the bytes that a layer of a dense pass over `num_tokens` tokens, all
    prompts', holds at once.

    Per token: four hidden states, the rotary tables, and the larger of FFN and attention
    activations. Attention makes query, key, value and output, the query once more, and the packed
    row and a copy. An FFN that takes some rows at a time holds the activations of these.
    """
    layer, geometry = attached.layers[0], attached.geometry
    hidden = layer.call.hidden.shape[-1]
    of_attention = {id(each) for each in layer.module.parameters()}
    attention = sum(each.numel() for each in layer.module.parameters() if each.dim() == 2) // hidden
    attention += geometry.head_dim * (geometry.num_heads + 4 * geometry.num_kv_heads)
    ffn = [each for each in layer.block.parameters() if id(each) not in of_attention]
    matrices = [weight for weight in ffn if weight.dim() == 2]
    # Of a tensor of experts a token meets a few. A product of two matrices in one stays as long as
    # its halves are used.
    num_experts = getattr(attached.decoder.stack.config, "num_experts_per_tok", None) or 1
    activations = num_experts * sum(max(weight.shape[1:]) for weight in ffn if weight.dim() == 3)
    if matrices:
        fused = max(weight.shape[0] for weight in matrices) - max(
            weight.shape[1] for weight in matrices
        )
        activations += sum(weight.numel() for weight in matrices) // hidden + max(0, fused)
    in_parts = {id(each) for module in attached.decoder.row_wise for each in module.parameters()}
    rows = num_tokens
    if {id(weight) for weight in matrices} <= in_parts:
        rows = min(num_tokens, attached.decoder.rows_at_once)
    elements = num_tokens * (4 * hidden + 4 * geometry.head_dim) + max(
        num_tokens * attention, rows * activations
    )
    return elements * attached.dtype.itemsize
