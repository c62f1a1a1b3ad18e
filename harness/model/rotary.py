"""Rotary positions of a model's keys: put on and taken off, in the layout that the model's own code has.

Nothing is known of a family. The layer's module makes keys of the same input at some positions and at position 0; of
the ways in which rotary embeddings lie in a head, the one that turns the latter into the former is taken.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.model.decoder import Decoder, Layer, attention_function, stop
from harness.model.model_cache import ModelCache

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
COARSE = 0.03
"""Of half precision keys."""


class Rotary(NamedTuple):
    """Which elements of a head are turned, and how.

    start, size: the turned elements; size 0: none are. interleaved: the elements 2i and 2i + 1 are a plane, else i and
    i + size / 2. planes: which of the angles that the model's own module makes are one of each plane.
    """

    layer: Layer
    start: int = 0
    size: int = 0
    interleaved: bool = False
    planes: slice = slice(None)

    def apply(self, states: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
        """States [batch, heads, n, head_dim] at `positions` int [batch, n]; `inverse` takes positions off."""
        if not self.size:
            return states
        cos, sin = (each[..., self.planes].to(states)[:, None] for each in angles(self.layer, states, positions))
        turned = states[..., self.start : self.start + self.size]
        first, second = (turned[..., 0::2], turned[..., 1::2]) if self.interleaved else turned.chunk(2, -1)
        sin = -sin if inverse else sin
        pair = first * cos - second * sin, second * cos + first * sin
        turned = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return torch.cat([states[..., : self.start], turned, states[..., self.start + self.size :]], -1)


def angles(layer: Layer, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of angles, [batch, n, planes or twice as many], as the model's own module makes them; a scale
    of both, which long-context variants have, is left out."""
    assert layer.positions is not None
    begin = torch.zeros_like(positions[:, :1])
    made = layer.positions.module.forward(  # past the hooks of a pass under way
        states.to(layer.device).float(), torch.cat([begin, positions], 1).to(layer.device), *layer.positions.options
    )
    cos, sin = (made.real, made.imag) if isinstance(made, Tensor) else made[:2]
    cos, sin = (each.expand(len(positions), -1, -1).float() for each in (cos, sin))
    scale = cos[:, :1]  # at position 0
    return (cos / scale)[:, 1:], (sin / scale)[:, 1:]


@torch.inference_mode()
def rotary_of(decoder: Decoder, layer: Layer) -> Rotary | None:
    """How a layer's keys are placed, as they are stored; None where that is not known."""
    given = layer.call.kwargs.get("position_embeddings")
    if given is not None and layer.positions is None:
        return None
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 4, layer.call.hidden.shape[-1], generator=generator).to(layer.call.hidden)
    positions = torch.tensor([[1, 5, 11, 40]])
    try:
        with attention_function(decoder.stack, stop):
            bare, placed = (_keys(decoder, layer, hidden, each) for each in (torch.zeros_like(positions), positions))
    except RuntimeError:  # its code takes no other rows than those of its own pass
        return None
    close = TOLERANCE.get(bare.dtype, COARSE) * float(bare.abs().max())
    if torch.allclose(bare, placed, atol=close):
        return Rotary(layer)
    if layer.positions is None:
        return None
    cos, _ = angles(layer, bare, positions)
    planes = _one_of_each(cos)
    size = 2 * cos[..., planes].shape[-1]
    for start in {0, layer.head_dim - size}:
        for interleaved in (False, True):
            rotary = Rotary(layer, start, size, interleaved, planes)
            if start >= 0 and torch.allclose(rotary.apply(bare, positions), placed, atol=close):
                return rotary
    return None


def _one_of_each(cos: Tensor) -> slice:
    """Which of the angles are one of each plane: where all are there twice, the first half, or every other one."""
    half = cos.shape[-1] // 2
    if torch.equal(cos[..., :half], cos[..., half:]):
        return slice(half)
    return slice(0, None, 2) if torch.equal(cos[..., 0::2], cos[..., 1::2]) else slice(None)


def _keys(decoder: Decoder, layer: Layer, hidden: Tensor, positions: Tensor) -> Tensor:
    """The keys [1, num_kv_heads, n, head_dim] that a layer stores of `hidden` at `positions` [1, n]."""
    positions = positions.to(hidden.device)
    cache = ModelCache(decoder.stack.config)
    made: Any = None
    if layer.positions is not None:
        made = layer.positions.module.forward(hidden, positions, *layer.positions.options)
    call = layer.call.with_hidden(
        hidden, position_embeddings=made, position_ids=positions, attention_mask=None, past_key_values=cache
    )
    key = decoder.run_to_attention(layer, call).key
    return key if layer.latent is None or cache.latest is None else torch.cat(cache.latest, -1)
