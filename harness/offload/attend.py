"""The attention of a decode step: one row of queries over the cached rows and its own token's.

`attend` is one fused call over rows that lie in one piece, the own one last. `attend_to_codes` decodes rows as it goes.
`attend_by_scores` makes the scores, for methods that look at them, for rows that lie in several places and for those of
a format that the kernels do not know. In both the own row is a part of its own.

Shapes: query [batch, heads, 1, head_dim]; what both return [batch, num_kv_heads, group, 1, head_dim].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.model.attention import row_attention
from harness.offload.store import KeyValue
from methods.base import attention_scores
from methods.codec import Codec


def attend(query: Tensor, rows: KeyValue, visible: Tensor | None, bias: Tensor | None, scale: float) -> Tensor:
    """In one call.

    rows: [batch, num_kv_heads, n + 1, head_dim], the own one last. Of the n others, visible: bool [batch, 1 or
    num_kv_heads, 1, n], None for all; bias: added to the scores, fp32 [batch, num_kv_heads, 1 or group, 1, n].
    """
    return row_attention(query, *rows, scale, _mask(visible, bias, query.dtype))


def attend_to_codes(
    query: Tensor,
    rows: Tensor,
    own: KeyValue,
    visible: Tensor | None,
    bias: Tensor | None,
    scale: float,
    codec: Codec,
) -> Tensor:
    """By kernels, where `has_kernels`.

    rows: the cached ones, packed, uint8 [batch, num_kv_heads, n, slot_bytes], contiguous in a head; own: [batch,
    num_kv_heads, 1, head_dim]; visible and bias as in `attend`.
    """
    from harness.offload.kernels import attention as kernels

    of_group = None if visible is None else visible.unsqueeze(2)
    return kernels.attend(query, rows, own, of_group, bias, scale, codec)


def _mask(visible: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Both in one, the own row included."""
    mask = None if visible is None else pad(visible, (0, 1), value=True)
    if bias is None:
        return mask
    added = pad(bias.squeeze(3), (0, 1)).to(dtype)
    return added if mask is None else added.masked_fill(~mask, float("-inf"))


def attend_by_scores(
    query: Tensor,
    parts: Sequence[KeyValue],
    own: KeyValue,
    visible: Tensor | None,
    scale: float,
    edit: Callable[[Tensor], None],
) -> Tensor:
    """With the scores fp32 [batch, num_kv_heads, group, 1, n + 1], the own one last, shown to `edit`, which may change
    those of the cached rows in place.

    parts: the n cached rows, together; own: [batch, num_kv_heads, 1, head_dim]; visible as in `attend`.
    """
    of_keys = (*(part.keys for part in parts), own.keys)
    *cached, of_own_key = (attention_scores(query, keys, scale) for keys in of_keys)
    if visible is not None:
        seen = visible.unsqueeze(2).split([part.shape[-1] for part in cached], -1)
        cached = [torch.where(*each, float("-inf")) for each in zip(seen, cached, strict=True)]
    scores = torch.cat([*cached, of_own_key], -1)
    edit(scores)
    probs = scores.softmax(-1).to(own.values.dtype)
    *of_parts, of_own = probs[..., 0, :].split([keys.shape[2] for keys in of_keys], -1)
    output = of_own * own.values  # [batch, kv, group, head_dim]
    for weights, part in zip(of_parts, parts, strict=True):
        output = output + weights @ part.values
    return output.unsqueeze(3)
