"""One dense pass that shows the scores of chosen layers to observers, a chunk of query rows at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from harness.model.attach import Attached, Handler
from harness.model.attention import dense_attention
from harness.replay.decode_rows import MAX_CHUNK, SCORES_PER_CHUNK
from methods.base import attention_scores


class Block(NamedTuple):
    """Query rows `start` to `stop` of a layer, over the keys before `stop`. Valid during the call only.

    query: [1, heads, rows, head_dim], before the softmax scale; key, value: [1, num_kv_heads, stop, head_dim];
    scores: of these rows, scaled, fp32 [1, num_kv_heads, group, rows, stop], -inf for later keys; not to be written to.
    """

    layer: int
    start: int
    stop: int
    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor

    def probs(self) -> Tensor:
        """Attention weights by query head: fp32 [heads, rows, stop]."""
        return self.scores.softmax(-1).flatten(1, 2)[0]


class Observer(Protocol):
    """Gathers a statistic of one layer."""

    def __call__(self, block: Block) -> None:
        """Take in the next rows; they come in order."""


class _DensePass(Handler):
    """Dense attention in every layer, observed in some."""

    def __init__(self, attached: Attached, observers: Mapping[int, Sequence[Observer]]) -> None:
        self.scale = attached.geometry.scale
        self.observers = observers

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if layer in self.observers:
            rows, heads = query.shape[2], query.shape[1]
            size = max(1, min(MAX_CHUNK, SCORES_PER_CHUNK // (heads * rows)))
            for start in range(0, rows, size):
                block = self._block(layer, query, key, value, start, min(start + size, rows))
                for observe in self.observers[layer]:
                    observe(block)
        return dense_attention(query, key, value, self.scale)

    def _block(self, layer: int, query: Tensor, key: Tensor, value: Tensor, start: int, stop: int) -> Block:
        query, key, value = query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop]
        scores = attention_scores(query, key, self.scale)
        column = torch.arange(stop, device=scores.device)
        later = column[start:] > column[start:, None]  # keys before `start` are visible to all rows
        scores[..., start:].masked_fill_(later, float("-inf"))
        return Block(layer, start, stop, query, key, value, scores)


def observe(attached: Attached, ids: Tensor, observers: Mapping[int, Sequence[Observer]]) -> None:
    """Run `ids` [1, tokens] densely and show the layers in `observers` to them."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    attached.forward(ids, positions, _DensePass(attached, observers))
