"""One dense pass that shows the scores of chosen layers to observers, a chunk of query rows at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from harness.model.attached import Attached
from harness.model.prompt import PromptPass
from harness.replay.decode_rows import MAX_CHUNK, SCORES_PER_CHUNK
from methods.base import Softmax


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
    softmax: Softmax

    def probs(self) -> Tensor:
        """Attention weights by query head: fp32 [heads, rows, stop]."""
        return self.softmax.weights(self.scores.clone()).flatten(1, 2)[0]


class Observer(Protocol):
    """Gathers a statistic of one layer."""

    def __call__(self, block: Block) -> None:
        """Take in the next rows; they come in order."""


def observe(attached: Attached, ids: Tensor, observers: Mapping[int, Sequence[Observer]]) -> None:
    """Run `ids` [1, tokens] densely and show the layers in `observers` to them. Layers are counted among those that see
    every token, as methods count them."""

    def show(layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        number = attached.numbers[layer]
        if number is None or number not in observers:
            return
        rows, heads = query.shape[2], query.shape[1]
        size = max(1, min(MAX_CHUNK, SCORES_PER_CHUNK // (heads * rows)))
        for start in range(0, rows, size):
            block = _block(number, attached.softmaxes[layer], query, key, value, start, min(start + size, rows))
            for see in observers[number]:
                see(block)

    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    attached.forward(ids, positions, PromptPass(attached, keep=show))


def _block(layer: int, softmax: Softmax, query: Tensor, key: Tensor, value: Tensor, start: int, stop: int) -> Block:
    query, key, value = query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop]
    scores = softmax.scores(query, key)
    column = torch.arange(stop, device=scores.device)
    later = column[start:] > column[start:, None]  # keys before `start` are visible to all rows
    scores[..., start:].masked_fill_(later, float("-inf"))
    return Block(layer, start, stop, query, key, value, scores, softmax)
