"""Attention scores and weights: the arithmetic that methods, replay and live decoding share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MANY_ROWS = 64
"""From this number of matrix rows on, all CPU threads share one matrix product. A live step has
fewer."""
PROMPT_CHUNK = 256
"""Prompt rows whose probabilities are held at once."""
PROMPT_BYTES = 2**28
"""Memory for these probabilities. It limits how many sequences are processed at once; one sequence
always is."""


class Softmax(NamedTuple):
    """How a layer turns products of queries and keys into attention weights.

    scale: factor of the products. softcap: scores become softcap * tanh(score / softcap) (Gemma 2).
    sinks: fp32 [heads], one more score per query head, whose weight goes to no token (gpt-oss).
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """True if torch's fused attention computes it."""
        return self.softcap is None and self.sinks is None

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Scaled and capped scores in fp32; shapes as in `attention_scores`."""
        return self.capped(attention_scores(query, key, self.scale))

    def capped(self, scores: Tensor) -> Tensor:
        """Apply the softcap to scaled scores, in place."""
        if self.softcap is None:
            return scores
        return scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def weights(self, scores: Tensor) -> Tensor:
        """Attention weights from scores [batch, num_kv_heads, group, rows, slots]. Overwrites the
        scores."""
        if self.sinks is None:
            return torch.softmax(scores, -1, out=scores)
        return torch.cat([scores, self._sinks_of(scores)], -1).softmax(-1)[..., :-1]

    def log_total(self, scores: Tensor) -> Tensor:
        """Logarithm of the sum of exp(score) over the slots and the sink, [batch, num_kv_heads,
        group, rows]."""
        scores = scores if self.sinks is None else torch.cat([scores, self._sinks_of(scores)], -1)
        return scores.logsumexp(-1)

    def of_kv_head(self, head: int, num_kv_heads: int) -> Softmax:
        """That of the group of one KV head of `num_kv_heads`."""
        if self.sinks is None:
            return self
        return self._replace(sinks=self.sinks.chunk(num_kv_heads)[head])

    def _sinks_of(self, scores: Tensor) -> Tensor:
        assert self.sinks is not None
        return self.sinks.view(*scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)


class Window(NamedTuple):
    """The tokens that a local layer sees: the last `size`, the row's own included; or, if
    `is_chunk`, those of the row's own chunk of `size` positions. weight: bytes of a token in this
    layer / bytes in a layer under the method."""

    size: int
    is_chunk: bool = False
    weight: float = 1.0

    def first_visible(self, positions: Tensor) -> Tensor:
        """First position that each row sees, int like `positions`."""
        if self.is_chunk:
            return positions - positions % self.size
        return (positions - (self.size - 1)).clamp(min=0)

    def num_cached(self, cached: Tensor) -> Tensor:
        """Number of the `cached` tokens that a row sees, its own not counted."""
        return cached % self.size if self.is_chunk else cached.clamp(max=self.size - 1)


def attention_scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Scaled scores of grouped queries in fp32, rounded nowhere else.

    query: [batch, heads, rows, head_dim]; key: [batch, num_kv_heads, slots, head_dim];
    returns [batch, num_kv_heads, group, rows, slots].
    """
    batch, num_kv_heads, slots, head_dim = key.shape
    heads, rows = query.shape[1:3]
    stacked = query.reshape(batch, num_kv_heads, -1, head_dim)
    if stacked.dtype != torch.float32 or key.dtype != torch.float32:
        scores = product(stacked, key.mT, scale)
    elif rows == 1:
        # On a CPU a thin product takes half the time with the keys first, where K and V lie side by
        # side.
        scores = (key @ (stacked * scale).mT).mT
    else:
        scores = by_matrix(stacked * scale, key.mT)
    return scores.reshape(batch, num_kv_heads, heads // num_kv_heads, rows, slots)


def product(left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
    """`left` [..., rows, n] times `right` [..., n, columns] times `scale`: fp32 [..., rows,
    columns].

    The sum over half precision factors stays in fp32. In bf16 a score of 60 would be rounded to a
    quarter, and other tokens would score best. CUDA multiplies half precision factors directly; a
    CPU converts them first.
    """
    if left.dtype == right.dtype == torch.float32:
        if scale != 1 and left.shape[-2] < right.shape[-1]:
            left = left * scale  # the smaller one
        elif scale != 1:
            right = right * scale
        return by_matrix(left, right)
    if left.device.type != "cuda" or left.dtype != right.dtype:
        return left.float() @ right.float() * scale
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    left, right = (part.expand(*batch, *part.shape[-2:]).flatten(0, -3) for part in (left, right))
    found = torch.bmm(left, right, out_dtype=torch.float32).unflatten(0, batch)
    return found if scale == 1 else found.mul_(scale)


def by_matrix(left: Tensor, right: Tensor) -> Tensor:
    """`left` [..., rows, n] @ `right` [..., n, columns]. Where a CPU multiplies many rows, one
    matrix after another, so that all threads share each; a batched product gives each thread whole
    matrices, and some threads wait."""
    rows, columns = left.shape[-2], right.shape[-1]
    if left.device.type != "cpu" or rows < MANY_ROWS:
        return left @ right
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    lefts, rights = (part.expand(*batch, *part.shape[-2:]).flatten(0, -3) for part in (left, right))
    out = left.new_empty(*batch, rows, columns)
    for one, other, into in zip(lefts, rights, out.flatten(0, -3), strict=True):
        torch.mm(one, other, out=into)
    return out


def mask_bias(visible: Tensor) -> Tensor:
    """0 where `visible`, -inf elsewhere, fp32. Vectorised on a CPU; `masked_fill` and `where`
    branch at every number, which takes six times as long on an unordered mask. Bytes become numbers
    six times as fast as truth values do."""
    ones = visible.view(torch.uint8).float()
    return ones.reciprocal_().neg_().add_(1)  # 1 - 1/1 = 0; 1 - 1/0 = -inf


def num_true(mask: Tensor) -> Tensor:
    """Number of True entries along the last axis, int64. On a CPU numpy adds up bytes in a fifth of
    the time that torch takes for truth values."""
    if mask.device.type != "cpu":
        return mask.sum(-1)
    return torch.from_numpy(mask.numpy().view(np.uint8).sum(-1, dtype=np.int32)).long()


def log_sum_exp(scores: Tensor) -> Tensor:
    """Logarithm of the sum of exp(score) along the last axis, which has a finite score. On a CPU
    this takes a third of the time of torch's `logsumexp`: the softmax is one vectorised pass, and
    its largest weight is exp(largest score) / sum."""
    return scores.amax(-1) - torch.softmax(scores, -1).amax(-1).log()


def hide(scores: Tensor, visible: Tensor) -> None:
    """Set `scores`, which are finite or -inf, to -inf where not `visible` (bool, broadcast), in
    place."""
    if scores.device.type == "cpu":
        scores += mask_bias(visible)
    else:
        scores.masked_fill_(~visible, float("-inf"))


def received_attention(
    query: Tensor, key: Tensor, real: Tensor, softmax: Softmax, first: int = 0
) -> Tensor:
    """Attention that each prompt token received from the prompt rows `first` and later, summed over
    rows and group.

    query: [batch, heads, prompt, head_dim]; key: [batch, num_kv_heads, prompt, head_dim]; real:
    [batch, prompt]; returns fp32 [batch, num_kv_heads, prompt].
    """
    sequence_bytes = query.shape[1] * PROMPT_CHUNK * key.shape[2] * torch.float32.itemsize
    at_once = max(1, PROMPT_BYTES // max(1, sequence_bytes))  # the prompt may be empty
    parts = zip(query.split(at_once), key.split(at_once), real.split(at_once), strict=True)
    return torch.cat([_received_attention(*part, softmax, first) for part in parts])


def _received_attention(
    query: Tensor, key: Tensor, real: Tensor, softmax: Softmax, first: int
) -> Tensor:
    batch, num_kv_heads, prompt, _ = key.shape
    total = torch.zeros(batch, num_kv_heads, prompt, device=key.device)
    column = torch.arange(prompt, device=key.device)
    for start in range(first, prompt, PROMPT_CHUNK):
        stop = min(start + PROMPT_CHUNK, prompt)
        scores = softmax.scores(query[:, :, start:stop], key[:, :, :stop])
        hidden = (column[:stop] > column[start:stop, None]) | ~real[:, None, None, None, :stop]
        probs = softmax.weights(scores.masked_fill_(hidden, float("-inf")))
        rows = real[:, None, None, start:stop, None].to(probs.dtype)
        total[:, :, :stop] += probs.nan_to_num_().mul_(rows).sum((2, 3))
    return total
