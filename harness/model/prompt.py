"""The dense pass over a prompt, which replay, live decoding, calibration and analyses share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from harness.model.attach import Attached, Handler
from harness.model.attention import padding_of, prompt_attention
from harness.model.decoder import ModelCache

Keep = Callable[[int, Tensor, Tensor, Tensor], None]
"""Takes a layer, and its query, key and value [batch, heads, prompt, size]."""


class PromptPass(Handler):
    """A dense causal pass over prompts. `keep` is given every layer's number, query, key and value as they come.

    real: bool [batch, prompt], False for the padding on the left; None: there is none.
    """

    def __init__(self, attached: Attached, real: Tensor | None = None, keep: Keep | None = None) -> None:
        self.attached = attached
        self.padding = () if real is None else padding_of(real)
        self.keep = keep

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.keep is not None:
            self.keep(layer, query, key, value)
        softmax, window = self.attached.softmaxes[layer], self.attached.layers[layer].window
        return prompt_attention(query, key, value, softmax, self.padding, window)


def positions_of(real: Tensor) -> Tensor:
    """Positions of left-padded prompts, int [batch, prompt]; 0 in the padding."""
    return (real.cumsum(-1) - 1).clamp(min=0)


@dataclass
class PrefilledPrompt:
    """A prompt that has run, from which several methods can start.

    real: bool [batch, prompt]; layers: (query, key, value) of each attention layer, [batch, heads, prompt, size];
    hidden: final hidden states of the last column [batch, hidden_size]; model_cache: recurrent layers' states.
    """

    real: Tensor
    layers: list[tuple[Tensor, Tensor, Tensor]]
    hidden: Tensor
    model_cache: ModelCache


def run_prompt(attached: Attached, ids: Tensor, real: Tensor) -> PrefilledPrompt:
    """One dense pass over left-padded prompts, ids and real [batch, prompt]."""
    attached.require_even(real)
    layers: list[tuple[Tensor, Tensor, Tensor]] = []

    def keep_layer(_: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        layers.append((_alone(query), _alone(key), _alone(value)))

    keep = PromptPass(attached, real, keep_layer)
    model_cache = attached.new_cache()
    hidden = attached.forward(ids, positions_of(real), keep, model_cache, real)
    return PrefilledPrompt(real, layers, hidden[:, -1], model_cache)


def _alone(states: Tensor) -> Tensor:
    """`states`, copied where they are a part of a larger tensor, a fused projection, that would be kept with them."""
    return states.clone() if states.untyped_storage().nbytes() > states.nbytes else states


def prompt_bytes(attached: Attached, num_tokens: int) -> int:
    """An upper bound of the bytes that a layer of a dense pass over `num_tokens` tokens, all prompts', holds at once.

    Per token: four hidden states, the rotary tables, and the larger of FFN and attention activations. Attention makes
    query, key, value and output, the query once more, and the packed row and a copy.
    """
    layer, geometry = attached.layers[0], attached.geometry
    hidden = layer.call.hidden.shape[-1]
    of_attention = {id(each) for each in layer.module.parameters()}
    attention = sum(each.numel() for each in layer.module.parameters() if each.dim() == 2) // hidden
    attention += geometry.head_dim * (geometry.num_heads + 4 * geometry.num_kv_heads)
    ffn = [each for each in layer.block.parameters() if id(each) not in of_attention]
    per_token = 4 * hidden + 4 * geometry.head_dim + max(attention, _ffn_elements(ffn, hidden, attached))
    return num_tokens * per_token * attached.dtype.itemsize


def _ffn_elements(weights: Sequence[Tensor], hidden: int, attached: Attached) -> int:
    """A token's activations in an FFN: one for each matrix, and another where two matrices are one, whose product
    stays as long as its halves are used. Of a tensor of experts a token meets a few."""
    matrices = [weight for weight in weights if weight.dim() == 2]
    experts = [weight for weight in weights if weight.dim() == 3]
    num_experts = getattr(attached.decoder.stack.config, "num_experts_per_tok", None) or 1
    of_experts = num_experts * sum(max(weight.shape[1:]) for weight in experts)
    if not matrices:
        return of_experts
    fused = max(weight.shape[0] for weight in matrices) - max(weight.shape[1] for weight in matrices)
    return sum(weight.numel() for weight in matrices) // hidden + max(0, fused) + of_experts
