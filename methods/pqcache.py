"""PQCache (Zhang et al., SIGMOD 2025): tokens scored by a product quantisation of their keys, after
their positions. A generated token takes the nearest existing centroids.

The rule, and where it differs (made into docs/methods.md):

**pqcache** cuts a key into parts of `part_size` (4) elements with 2^`bits` (64) centroids each,
from k-means on the prompt's keys without the first `num_sinks` (4) tokens. A token's score is the
sum of its centroids' products with the query; a group adds its heads' probabilities. `recent_frac`
(0.25) is a share of the tokens read beside the sinks. K-means starts at even distances (the
official code at random) and runs `iterations` (10) rounds, so that a prompt has the same codes in
any batch.

- The official code has 32 first tokens, as many recent ones as best ones, and two parts of a key.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from methods.base import Geometry, Lengths, PromptRows, QueryRows, require
from methods.selection import Retrieving, RetrievingState
from methods.settings import Allowed, least, setting


class PQCacheState(RetrievingState):
    """centroids[layer]: [batch, num_kv_heads, parts, 2^bits, part_size], fp32. codes[layer]: uint8
    [batch, num_kv_heads, slots, parts]."""

    sequence_tensors = ("centroids",)
    slot_tensors = {"codes": 0}
    replayable = True
    centroids: dict[int, Tensor]
    codes: dict[int, Tensor]

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        """Cluster the prompt's keys without the sinks, which are unlike all others; code all
        keys."""
        method = self.method
        first = (rows.lengths - 1).clamp(max=method.num_sinks)
        clustered = rows.real & (rows.positions >= first[:, None])
        self.centroids[layer] = kmeans(self._cut(key), clustered, 2**method.bits, method.iterations)
        shape = (*key.shape[:2], rows.num_slots, key.shape[-1] // method.part_size)
        self.codes[layer] = torch.zeros(shape, dtype=torch.uint8, device=key.device)
        super().prompt(layer, query, key, value, rows)

    def append(
        self, layer: int, key: Tensor, value: Tensor, positions: Tensor, slots: slice | Tensor
    ) -> None:
        codes = nearest(self._cut(key), self.centroids[layer])
        self.codes[layer][:, :, slots] = codes.transpose(2, 3).to(torch.uint8)

    def scores(self, layer: int, rows: QueryRows) -> Tensor:
        """The sum over parts of the query's product with the token's centroid."""
        geometry, slots = self.geometry, rows.slot_positions.shape[-1]
        stacked = rows.query.float().unflatten(1, (geometry.num_kv_heads, -1)).flatten(2, 3)
        # [batch, kv, parts, group * rows, 2^bits]
        tables = self._cut(stacked * geometry.scale) @ self.centroids[layer].mT
        codes = self.codes[layer][:, :, :slots].long().unsqueeze(2)
        shape = (*tables.shape[:2], tables.shape[3], slots)
        scores = tables.new_zeros(shape)
        for table, code in zip(tables.unbind(2), codes.unbind(-1), strict=True):
            scores += table.gather(-1, code.expand(shape))
        return scores.unflatten(2, (geometry.group, -1))

    def index_read(self, layer: int, positions: Tensor) -> Tensor:
        """The codes of every token, and the centroids once."""
        head_dim, method = self.geometry.head_dim, self.method
        token_bits = head_dim // method.part_size * method.bits
        bits = positions.double() * token_bits + 2**method.bits * head_dim * 16
        return bits / (16 * self.geometry.elements)

    def _cut(self, vectors: Tensor) -> Tensor:
        """[batch, num_kv_heads, n, head_dim] as parts [batch, num_kv_heads, parts, n, part_size],
        fp32."""
        return vectors.float().unflatten(-1, (-1, self.method.part_size)).transpose(2, 3)


@dataclass(frozen=True)
class PQCache(Retrieving):
    """Reads the first tokens, the most recent ones, and the best by their codes. Defaults are the
    best of those tried on SmolLM2.

    Source: PQCache (SIGMOD 2025)
    Keeps: every token; codes of its key
    Reads: first and recent tokens, and the best by their codes
    """

    group: str = "sum_probs"
    num_sinks: int = 4
    recent_frac: float = setting(
        0.25, "share of the tokens read, beside the sinks, that are the most recent"
    )
    part_size: int = setting(4, "elements of a key that are coded together", least(1))
    bits: int = setting(
        6, "bits of a code", Allowed("an integer from 1 to 8", lambda value: 1 <= value <= 8)
    )
    iterations: int = setting(10, "rounds of k-means", least(0))

    title = "PQCache"
    state = PQCacheState

    def check(self, geometry: Geometry, lengths: Lengths) -> None:
        divides = f"a divisor of {geometry.head_dim}, the elements of a head"
        require(geometry.head_dim % self.part_size == 0, "part_size", self.part_size, divides)
        super().check(geometry, lengths)

    def forced(
        self, first: Tensor, last: Tensor, positions: Tensor, num_read: Tensor
    ) -> Tensor | None:
        return super().forced(first, last, positions, (num_read - self.num_sinks).clamp(min=0))


def kmeans(points: Tensor, real: Tensor, count: int, iterations: int) -> Tensor:
    """Centroids [batch, ..., count, elements] of `points` [batch, ..., n, elements] where `real`,
    bool [batch, n].

    They start at points at even distances, so that the same points give the same centroids in any
    batch. With fewer points than centroids, each point is a centroid. A centroid that is nearest to
    no point stays where it is.
    """
    per_head = (slice(None), *[None] * (points.dim() - 3))
    rank = torch.arange(count, device=points.device) * real.sum(-1, keepdim=True) // count
    start = torch.searchsorted(real.cumsum(-1), rank + 1)[per_head].unsqueeze(-1)
    centroids = points.gather(-2, start.expand(*points.shape[:-2], count, points.shape[-1]))
    numbers = torch.arange(count, device=points.device)
    for _ in range(iterations):
        is_nearest = nearest(points, centroids).unsqueeze(-1) == numbers
        member = is_nearest & real[per_head].unsqueeze(-1)
        size = member.sum(-2).unsqueeze(-1)
        mean = member.to(points.dtype).mT @ points / size.clamp(min=1)
        centroids = torch.where(size > 0, mean, centroids)
    return centroids


def nearest(points: Tensor, centroids: Tensor) -> Tensor:
    """Number of the centroid [..., count, elements] that is nearest to each of `points` [..., n,
    elements]."""
    return (centroids.square().sum(-1).unsqueeze(-2) - 2 * points @ centroids.mT).argmin(-1)
