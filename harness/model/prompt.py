"""The dense pass over a prompt, which replay, live decoding, calibration and analyses share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from harness.model.attached import Attached, Handler
from harness.model.attention import padding_of, prompt_attention
from harness.model.model_cache import ModelCache

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
