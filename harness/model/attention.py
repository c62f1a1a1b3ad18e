"""Attention kernels shared by replay, calibration and live decoding. Grouped-query heads throughout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from methods.base import Rest


def dense_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, visible: Tensor | None = None) -> Tensor:
    """torch's fused attention.

    query: [batch, heads, rows, head_dim]; key, value: [batch, num_kv_heads, slots, head_dim];
    visible: bool [batch, 1, rows, slots]; None is causal over equal rows and slots. Returns [batch, rows, heads,
    head_dim].
    """
    if query.shape[2] == 1 and visible is not None:
        return heads_last(row_attention(query, key, value, scale, visible))
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, is_causal=visible is None, scale=scale
    )
    return output.transpose(1, 2)


def row_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """torch's fused attention of one row: the heads of a group are its rows, so that no key is copied.

    query: [batch, heads, 1, head_dim]; mask: bool, True where visible, or added to the scores, [batch, 1 or
    num_kv_heads, 1 or group, slots]; None hides nothing. Returns [batch, num_kv_heads, group, 1, head_dim].
    """
    stacked = query.reshape(*key.shape[:2], -1, query.shape[3])
    return F.scaled_dot_product_attention(stacked, key, value, attn_mask=mask, scale=scale).unsqueeze(3)


def prompt_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, unused: Sequence[int]) -> Tensor:
    """Causal attention of prompts padded on the left; `unused` [batch] counts the rows before each, which give zeros.

    Shapes as in `dense_attention`. Prompts of unequal length go one by one: causal attention does half the work of one
    under a mask, which would also hold batch x prompt x prompt elements.
    """
    if not any(unused):
        return dense_attention(query, key, value, scale)
    output = torch.zeros_like(query.transpose(1, 2))
    for at, first in enumerate(unused):
        own = slice(at, at + 1), slice(None), slice(first, None)
        output[at : at + 1, first:] = dense_attention(query[own], key[own], value[own], scale)
    return output


def padding(real: Tensor) -> list[int]:
    """Rows of padding before each prompt; real: bool [batch, prompt]."""
    return (~real).sum(-1).tolist()


def weighted_values(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of `scores` [batch, num_kv_heads, group, rows, slots] over `value` [batch, num_kv_heads, slots, d].

    Overwrites `scores`. Returns the output [batch, num_kv_heads, group, rows, head_dim] and the probabilities.
    """
    batch, num_kv_heads, group, rows, slots = scores.shape
    probs = torch.softmax(scores, -1, out=scores)
    stacked = probs.view(batch, num_kv_heads, group * rows, slots).to(value.dtype)
    return (stacked @ value).view(batch, num_kv_heads, group, rows, -1), probs


def with_rest(output: Tensor, rest: Rest | None) -> Tensor:
    """`output` [batch, num_kv_heads, group, rows, head_dim] mixed with what stands for the tokens not read."""
    if rest is None:
        return output
    share = rest.share.unsqueeze(-1).to(output.dtype)
    return torch.lerp(output, rest.value.unsqueeze(2).to(output.dtype).expand_as(output), share)


def heads_last(output: Tensor) -> Tensor:
    """[batch, num_kv_heads, group, rows, head_dim] as [batch, rows, heads, head_dim]."""
    return output.flatten(1, 2).transpose(1, 2)
