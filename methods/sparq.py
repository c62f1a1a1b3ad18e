"""SparQ (Ribar et al., ICML 2024): score on the channels in which the present query is largest.

The channels change from query to query, so the index is the keys themselves, all of them on the device. What is not
read is represented by the mean value, weighted by the attention that the scores give it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from methods.base import EMPTY, Calibration, Geometry, Lengths, PromptRows, Rest, Rows, State
from methods.checks import require
from methods.projected import PartialKeysState, Projected
from methods.retrieving import RetrievingState


@dataclass(frozen=True)
class SparQ(Projected):
    """SparQ's settings; the defaults are the paper's r = head_dim / 4, k = 128, l = k / 4.

    mean_value: let the mean value stand for what is not read.
    """

    mean_value: bool = True

    read_tokens: int | None = 128
    recent_frac: float = 0.25
    group: str = "sum_logits"
    index_bits: ClassVar[None] = None  # type: ignore[misc]  # the index is the keys

    title = "SparQ"

    def __post_init__(self) -> None:
        super().__post_init__()
        in_layer = self.when == "own_query" or not self.mean_value
        require(
            in_layer, "when", self.when, "own_query, where the own token's weight is known; or set mean_value=false"
        )

    def new_state(self, geometry: Geometry, lengths: Lengths, calibration: Calibration | None = None) -> State:
        """No calibration."""
        return SparQState(self, geometry, lengths)


class SparQState(PartialKeysState, RetrievingState):
    """value_sum[layer]: fp32 [batch, num_kv_heads, head_dim], sum of all values so far.

    through[layer]: fp32 [batch, num_kv_heads, rows, head_dim], the sum up to each of the rows that were appended last,
    and first[layer]: int [batch], the position of the first of them; from their `append` to their `select`.
    """

    sequence_tensors = ("value_sum",)
    value_sum: dict[int, Tensor]

    def __init__(self, method: SparQ, geometry: Geometry, lengths: Lengths) -> None:
        super().__init__(method, geometry, lengths)
        self.through: dict[int, Tensor] = {}
        self.first: dict[int, Tensor] = {}

    def partial_key(self, layer: int, key: Tensor) -> Tensor:
        """All of it."""
        return key

    def partial_query(self, layer: int, query: Tensor) -> Tensor:
        """The largest channels of each row, by the sum over the group; the scale makes up for the others."""
        query = query.float()
        magnitude = query.abs()
        best = magnitude.sum(2, keepdim=True).topk(self.method.num_columns(query.shape[-1])).indices
        kept = torch.zeros_like(query[:, :, :1]).scatter_(-1, best, 1.0)
        share = (magnitude * kept).sum(-1, keepdim=True) / magnitude.sum(-1, keepdim=True)
        return query * kept * self.geometry.scale / share.sqrt()

    def prompt(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows) -> None:
        """Of the values only the sum is kept."""
        self.value_sum[layer] = value.new_zeros((*value.shape[:2], value.shape[-1]), dtype=torch.float32)
        super().prompt(layer, query, key, value, rows)
        del self.through[layer], self.first[layer]

    def append(self, layer: int, key: Tensor, value: Tensor, positions: Tensor, slots: slice) -> None:
        """Keep the keys, and add the values up."""
        super().append(layer, key, value, positions, slots)
        entering = value.float().masked_fill((positions == EMPTY)[:, None, :, None], 0.0)
        self.through[layer] = self.value_sum[layer].unsqueeze(2) + entering.cumsum(2)
        self.first[layer] = positions[:, 0]
        self.value_sum[layer] = self.through[layer][:, :, -1].clone()

    def rest(self, layer: int, rows: Rows, scores: Tensor, mask: Tensor) -> Rest | None:
        """The mean value, of the cached tokens and the own one, weighs what the scores give to those not read."""
        if not self.method.mean_value:
            return None
        own = rows.own_slots.unsqueeze(-1)
        seen = rows.visible().scatter(-1, own, True).unsqueeze(2)
        read = mask.scatter(-1, own.expand(-1, mask.shape[1], -1, -1), True).unsqueeze(2)
        softmax = self.geometry.softmax(layer)
        weights = softmax.weights(softmax.capped(scores).masked_fill(~seen, -math.inf))
        share = weights.masked_fill(read, 0.0).sum(-1)
        through, row = self.through[layer], rows.positions - self.first[layer][:, None]
        index = row.clamp(0, through.shape[2] - 1).long()[:, None, :, None]
        total = through.gather(2, index.expand(-1, through.shape[1], -1, through.shape[-1]))
        return Rest(share, total / (rows.positions + 1)[:, None, :, None])

    def index_read(self, layer: int, positions: Tensor) -> Tensor:
        """The channels of each key, and the mean value."""
        head_dim, elements = self.geometry.head_dim, self.geometry.elements
        channels = positions.double() * self.method.num_columns(head_dim) / elements
        return channels + self.method.mean_value * (self.geometry.value_dim or head_dim) / elements
