"""Attention of many rows, as replay, prompts and calibration compute it; rotary positions of keys.

Heads are grouped-query heads throughout. No code here knows a model family by its name: rotary
positions are put on and taken off in the layout of the model's own code, which `rotary_of` finds by
trying.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from harness.model.calls import attention_function, reraise_out_of_memory, stop, tolerance
from harness.model.decoder import Decoder
from harness.model.model_cache import ModelCache
from harness.model.trace import Layer
from methods.attention import Softmax, by_matrix
from methods.base import Rest, Window

ROWS = 256
"""Query rows whose scores or masks are held at once, where they are."""
SCORES_PER_CHUNK = 2**23
"""Scores held at once, 32 MiB in fp32: more than a CPU's last-level cache is slower."""
LEAST_NORM = 1e-12
"""Of an attention output, so that the error of one that is all zeros is a number."""
ROW_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""torch's ways to attend in a decode step: all but cuDNN's, which plans anew for each number of
cached tokens. That took 73 ms of the host in every step of an H100 (benchmarks/NOTES.md)."""


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, visible: Tensor | None = None
) -> Tensor:
    """Attention to all visible tokens, by torch's fused kernel where it computes this softmax.

    query: [batch, heads, rows, head_dim]; key, value: [batch, num_kv_heads, slots, head_dim or
    value_dim]; visible: bool [batch, 1, rows, slots]; None is causal over equal rows and slots.
    Returns [batch, rows, heads, value_dim].
    """
    if not softmax.is_plain:
        return _attention_by_scores(query, key, value, softmax, visible)
    if query.shape[2] == 1 and visible is not None:
        return heads_last(row_attention(query, key, value, softmax.scale, visible))
    value_dim = value.shape[3]
    if value_dim < key.shape[3]:  # the fused kernel wants keys and values of one size
        value = F.pad(value, (0, key.shape[3] - value_dim))
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, is_causal=visible is None, scale=softmax.scale
    )
    return output[..., :value_dim].transpose(1, 2)


def _attention_by_scores(
    query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, visible: Tensor | None
) -> Tensor:
    """With a softcap or sinks, which the fused kernel does not know; some rows at a time."""
    outputs = []
    for begin in range(0, query.shape[2], ROWS):
        rows = slice(begin, begin + ROWS)
        scores = softmax.scores(query[:, :, rows], key)
        if visible is None:
            tokens = torch.arange(key.shape[2], device=key.device)
            hidden = tokens > tokens[rows, None]
        else:
            hidden = ~visible[:, None, :, rows]
        scores.masked_fill_(hidden, float("-inf"))
        outputs.append(weighted_values(scores, value, softmax)[0])
    return heads_last(torch.cat(outputs, 3))


def row_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None
) -> Tensor:
    """torch's fused attention of one row. A group's heads are its rows, so no key is copied.

    query: [batch, heads, 1, head_dim]; mask: bool, True where visible, or added to the scores,
    [batch, 1 or num_kv_heads, 1 or group, slots]; None hides nothing. Returns [batch, num_kv_heads,
    group, 1, value_dim].
    """
    stacked = query.reshape(*key.shape[:2], -1, query.shape[3])
    output = F.scaled_dot_product_attention(stacked, key, value, attn_mask=mask, scale=scale)
    return output.unsqueeze(3)


def prompt_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax: Softmax,
    padding: Sequence[int] = (),
    window: Window | None = None,
) -> Tensor:
    """Causal attention of left-padded prompts. padding: rows before each prompt, which give zeros.

    Shapes as in `dense_attention`. Prompts of unequal length run one by one: causal attention does
    half the work of attention under a mask, which would also hold batch x prompt x prompt elements.
    """
    if not any(padding):
        return _causal_attention(query, key, value, softmax, window)
    output = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    for at, first in enumerate(padding):
        own = slice(at, at + 1), slice(None), slice(first, None)
        attended = _causal_attention(query[own], key[own], value[own], softmax, window)
        output[at : at + 1, first:] = attended
    return output


def _causal_attention(
    query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, window: Window | None
) -> Tensor:
    """Causal attention of rows without padding."""
    num_rows = query.shape[2]
    if window is None or num_rows <= window.size:
        return dense_attention(query, key, value, softmax)
    outputs = []
    for begin in range(0, num_rows, ROWS):
        end = min(begin + ROWS, num_rows)
        first_seen = int(window.first_visible(torch.tensor(begin)))
        tokens = torch.arange(first_seen, end, device=query.device)
        visible = seen_by_last(tokens, end - begin, window)
        output = dense_attention(
            query[:, :, begin:end],
            key[:, :, first_seen:end],
            value[:, :, first_seen:end],
            softmax,
            visible.expand(len(key), 1, *visible.shape),
        )
        outputs.append(output)
    return torch.cat(outputs, 1)


def seen_by_last(tokens: Tensor, num_rows: int, window: Window | None) -> Tensor:
    """Which of the tokens at these positions, int [slots], the last of them see in a causal pass:
    bool [num_rows, slots]."""
    rows = tokens[-num_rows:, None]
    visible = tokens <= rows
    return visible if window is None else visible & (tokens >= window.first_visible(rows))


def weighted_values(scores: Tensor, value: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
    """`scores` [batch, num_kv_heads, group, rows, slots] as weights of `value` [batch,
    num_kv_heads, slots, value_dim].

    Overwrites `scores`. Returns the output [batch, num_kv_heads, group, rows, value_dim] and the
    weights.
    """
    batch, num_kv_heads, group, rows, slots = scores.shape
    weights = softmax.weights(scores)
    stacked = weights.reshape(batch, num_kv_heads, group * rows, slots).to(value.dtype)
    return by_matrix(stacked, value).view(batch, num_kv_heads, group, rows, -1), weights


def with_rest(output: Tensor, rest: Rest | None) -> Tensor:
    """`output` [batch, num_kv_heads, group, rows, value_dim] mixed with the stand-in for the tokens
    not read."""
    if rest is None:
        return output
    assert rest.share is not None, "a log-mass becomes a share where the scores are known"
    value = rest.value.to(output.dtype).expand_as(output)
    share = rest.share.unsqueeze(-1).to(output.dtype)
    return torch.lerp(output, value, share)


def heads_last(output: Tensor) -> Tensor:
    """[batch, num_kv_heads, group, rows, value_dim] as [batch, rows, heads, value_dim]."""
    return output.flatten(1, 2).transpose(1, 2)


# Rotary positions


class Rotary(NamedTuple):
    """Which elements of a head are turned, and how.

    start, size: the turned elements; size 0: none are. interleaved: the elements 2i and 2i + 1 are
    a plane, else i and i + size / 2. planes: which of the angles that the model's own module makes
    are one of each plane.
    """

    layer: Layer
    start: int = 0
    size: int = 0
    interleaved: bool = False
    planes: slice = slice(None)

    def apply(self, states: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
        """States [batch, heads, n, head_dim] at `positions` int [batch, n]; `inverse` takes
        positions off."""
        if not self.size:
            return states
        cos, sin = angles(self.layer, states, positions)
        cos = cos[..., self.planes].to(states)[:, None]
        sin = sin[..., self.planes].to(states)[:, None]
        if inverse:
            sin = -sin
        end = self.start + self.size
        turned = states[..., self.start : end]
        if self.interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned.chunk(2, -1)
        pair = first * cos - second * sin, second * cos + first * sin
        turned = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return torch.cat([states[..., : self.start], turned, states[..., end:]], -1)


def angles(layer: Layer, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of angles, [batch, n, planes or twice as many], as the model's own module
    makes them; a scale of both, which long-context variants have, is left out."""
    assert layer.positions is not None
    begin = torch.zeros_like(positions[:, :1])
    device = layer.call.hidden.device
    from_begin = torch.cat([begin, positions], 1).to(device)
    made = layer.positions.embeddings(states.to(device).float(), from_begin)
    cos, sin = (made.real, made.imag) if isinstance(made, Tensor) else made[:2]
    cos = cos.expand(len(positions), -1, -1).float()
    sin = sin.expand(len(positions), -1, -1).float()
    scale = cos[:, :1]  # at position 0
    return (cos / scale)[:, 1:], (sin / scale)[:, 1:]


@torch.inference_mode()
def rotary_of(decoder: Decoder, layer: Layer) -> Rotary | None:
    """The rotary layout of a layer's stored keys; None where no layout fits."""
    if layer.positions is None and layer.call.kwargs.get("position_embeddings") is not None:
        return None
    like = layer.call.hidden
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 4, like.shape[-1], generator=generator).to(like)

    def keys(positions: Tensor) -> Tensor:
        """The stored keys [1, num_kv_heads, 4, head_dim] of `hidden` at `positions` [1, 4]."""
        positions = positions.to(hidden.device)
        cache = ModelCache(decoder.stack.config)
        embeddings = None
        if layer.positions is not None:
            embeddings = layer.positions.embeddings(hidden, positions)
        call = layer.rerun(hidden, cache, position_embeddings=embeddings, position_ids=positions)
        key = decoder.run_to_attention(layer, call).key
        if layer.latent is None or cache.latest is None:
            return key
        return torch.cat(cache.latest, -1)

    positions = torch.tensor([[1, 5, 11, 40]])
    try:
        with attention_function(decoder.stack, stop):
            bare, placed = keys(torch.zeros_like(positions)), keys(positions)
    except RuntimeError as error:  # its code takes no other rows than those of its own pass
        reraise_out_of_memory(error)
        return None
    close = tolerance(bare.dtype) * float(bare.abs().max())
    if torch.allclose(bare, placed, atol=close):
        return Rotary(layer)
    if layer.positions is None:
        return None
    cos, _ = angles(layer, bare, positions)
    half = cos.shape[-1] // 2
    planes = slice(None)
    if torch.equal(cos[..., :half], cos[..., half:]):  # every plane's angle is there twice
        planes = slice(half)
    elif torch.equal(cos[..., 0::2], cos[..., 1::2]):
        planes = slice(0, None, 2)
    size = 2 * cos[..., planes].shape[-1]
    for start in {0, layer.head_dim - size}:
        for interleaved in (False, True):
            rotary = Rotary(layer, start, size, interleaved, planes)
            if start >= 0 and torch.allclose(rotary.apply(bare, positions), placed, atol=close):
                return rotary
    return None


def relative_error(output: Tensor, full: Tensor) -> Tensor:
    """|output - full| / |full| of each row and head: fp32 [batch, rows, heads], of attention
    outputs [batch, rows, heads, value_dim]. Norms are Euclidean."""
    off = torch.linalg.vector_norm(output.float() - full.float(), dim=-1)
    whole = torch.linalg.vector_norm(full.float(), dim=-1)
    return off / whole.clamp(min=LEAST_NORM)


def read_by_any(visible: Tensor) -> Tensor:
    """Columns that some row reads: bool [batch, 1 or num_kv_heads, columns], of `visible` [...,
    rows, columns]. The largest byte is found in a sixtieth of the time of `any`."""
    return visible.view(torch.uint8).amax(2).bool()
