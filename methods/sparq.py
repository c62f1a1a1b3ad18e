"""SparQ (Ribar et al., ICML 2024): scores on the channels in which the present query is largest.

The rule, and where it differs (made into docs/methods.md):

**sparq**: the channels in which the present query is largest. They change every step, so all keys
lie on the device. Scores are divided by the root of the share of |q| that the channels hold. The
output is (1 - u) · attention + u · the mean of all values, u the softmax weight of the tokens not
read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from methods.base import EMPTY, Calibration, PromptRows, QueryRows, Rest, When
from methods.projection import PartialKeysState, Projected
from methods.selection import RetrievingState
from methods.settings import one_of, setting


class SparQState(PartialKeysState, RetrievingState):
    """value_sum[layer]: fp32 [batch, num_kv_heads, head_dim], sum of all values so far.

    For the rows that were appended last: through[layer], fp32 [batch, num_kv_heads, rows,
    head_dim], the sum up to each row, and first[layer], int [batch], the position of the first row.
    """

    sequence_tensors = ("value_sum",)
    replayable = True
    value_sum: dict[int, Tensor]

    def start(self, calibration: Calibration | None) -> None:
        super().start(calibration)
        self.through: dict[int, Tensor] = {}
        self.first: dict[int, Tensor] = {}

    def partial_query(self, layer: int, query: Tensor) -> Tensor:
        """The largest channels of each row, by the sum over the group; the scale makes up for the
        others."""
        query = query.float()
        magnitude = query.abs()
        best = magnitude.sum(2, keepdim=True).topk(self.method.num_columns(query.shape[-1])).indices
        kept = torch.zeros_like(query[:, :, :1]).scatter_(-1, best, 1.0)
        share = (magnitude * kept).sum(-1, keepdim=True) / magnitude.sum(-1, keepdim=True)
        return query * kept * self.geometry.scale / share.sqrt()

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        shape = (*value.shape[:2], value.shape[-1])
        self.value_sum[layer] = value.new_zeros(shape, dtype=torch.float32)
        super().prompt(layer, query, key, value, rows)
        del self.through[layer], self.first[layer]

    def append(
        self, layer: int, key: Tensor, value: Tensor, positions: Tensor, slots: slice | Tensor
    ) -> None:
        super().append(layer, key, value, positions, slots)
        entering = value.float().masked_fill((positions == EMPTY)[:, None, :, None], 0.0)
        self.through[layer] = self.value_sum[layer].unsqueeze(2) + entering.cumsum(2)
        self.first[layer] = positions[:, 0]
        self.value_sum[layer].copy_(self.through[layer][:, :, -1])

    def rest(self, layer: int, rows: QueryRows, scores: Tensor, mask: Tensor) -> Rest:
        """The mean value of the cached tokens and the own one, weighted by the scores of the tokens
        not read."""
        own = rows.own_slots.unsqueeze(-1)
        seen = rows.visible().scatter(-1, own, True).unsqueeze(2)
        read = mask.scatter(-1, own.expand(-1, mask.shape[1], -1, -1), True).unsqueeze(2)
        softmax = self.geometry.softmax(layer)
        weights = softmax.weights(softmax.capped(scores).masked_fill(~seen, -math.inf))
        share = weights.masked_fill(read, 0.0).sum(-1)
        through, row = self.through[layer], rows.positions - self.first[layer][:, None]
        index = row.clamp(0, through.shape[2] - 1).long()[:, None, :, None]
        total = through.gather(2, index.expand(-1, through.shape[1], -1, through.shape[-1]))
        return Rest(share, (total / (rows.positions + 1)[:, None, :, None]).unsqueeze(2))

    def index_read(self, layer: int, positions: Tensor) -> Tensor:
        """The channels of each key, and the mean value."""
        head_dim, elements = self.geometry.head_dim, self.geometry.elements
        channels = positions.double() * self.method.num_columns(head_dim) / elements
        return channels + (self.geometry.value_dim or head_dim) / elements


@dataclass(frozen=True)
class SparQ(Projected):
    """Scores on the query's largest channels; the index is the keys. Defaults are the paper's r =
    head_dim / 4, k = 128, l = k / 4.

    Source: SparQ (ICML 2024)
    Keeps: every token; all keys twice, the mean value
    Reads: the best by the query's largest channels
    """

    read_tokens: int | None = 128
    recent_frac: float = 0.25
    group: str = "sum_logits"
    # The mean value's weight is the current token's, too, whose score the own query alone knows.
    when: When = setting("own_query", allowed=one_of("own_query"))

    title = "SparQ"
    state = SparQState
